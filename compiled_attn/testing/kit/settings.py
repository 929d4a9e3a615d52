"""Torch's global state that a call of an op must leave as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["changed", "settings", "unchanged"]

_ONEDNN: Any = torch.backends.mkldnn


def settings(device: str) -> dict[str, Any]:
    """Returns torch's global settings by name, and the states of its default generators."""
    found: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic debug mode": torch.get_deterministic_debug_mode(),
        "precision of float32 matmuls": _precision(),
        "number of threads": torch.get_num_threads(),
        "state of the default generator": torch.get_rng_state(),
    }
    if device.startswith("cuda"):
        found["state of the CUDA generator"] = torch.cuda.get_rng_state(device)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Describes the first setting that differs, or returns None."""
    for name, old in before.items():
        new = after[name]
        if isinstance(old, Tensor):
            if not torch.equal(old, new):
                return f"the call changed the {name}: use a generator of the op's own"
        elif old != new:
            return f"the call changed the {name} of torch: expected {old}, got {new}"
    return None


@contextlib.contextmanager
def unchanged(device: str) -> Iterator[None]:
    """Restores the settings and generators at its end."""
    before = settings(device)
    try:
        yield
    finally:
        _restore(before, device)


def _restore(before: dict[str, Any], device: str) -> None:
    after = settings(device)
    for name, old in before.items():
        if changed({name: old}, after) is None:
            continue
        if name == "default dtype":
            torch.set_default_dtype(old)
        elif name == "default device":  # None removes the mode that sets it
            torch.set_default_device(None if old.type == "cpu" else old)
        elif name == "grad mode":
            torch.set_grad_enabled(old)
        elif name == "deterministic debug mode":
            torch.set_deterministic_debug_mode(old)
        elif name == "precision of float32 matmuls":
            _set_precision(*old)
        elif name == "number of threads":
            torch.set_num_threads(old)
        elif name == "state of the default generator":
            torch.set_rng_state(old)
        else:
            torch.cuda.set_rng_state(old, device)


def _precision() -> tuple[str | None, str, str]:
    """The setting for all backends, None where they differ, and those of CUDA and oneDNN."""
    of_all = None
    with contextlib.suppress(RuntimeError):
        of_all = torch.get_float32_matmul_precision()
    return of_all, torch.backends.cuda.matmul.fp32_precision, _ONEDNN.matmul.fp32_precision


def _set_precision(of_all: str | None, cuda: str, onednn: str) -> None:
    if of_all is not None:
        torch.set_float32_matmul_precision(of_all)  # sets those below too
    torch.backends.cuda.matmul.fp32_precision = cuda
    _ONEDNN.matmul.fp32_precision = onednn
