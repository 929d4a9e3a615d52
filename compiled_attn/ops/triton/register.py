"""Registers the Triton ops for CUDA tensors, without importing Triton."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from graphs.installation import install_command

__all__ = ["measured_plans", "register", "why_not"]

_MODULES = {
    "paged_attention": "launch",
    "paged_attention_": "launch",
    "quantised_linear": "linear_launch",
    "quantised_linears": "linear_launch",
    "quantised_swiglu": "linear_launch",
    "quantised_rows": "linear_launch",
}


def why_not() -> str | None:
    """Returns why CUDA tensors have no op here, or None."""
    if find_spec("triton") is None:
        return f"which is not installed: {install_command('triton')}"
    if not torch.cuda.is_available():
        return "but torch sees no CUDA device here"
    return None


def register(library: torch.library.Library, key: str = "CUDA") -> None:
    """Registers kernels for the ops, which are already defined."""
    for name in _MODULES:
        library.impl(name, _op(name), key)


def measured_plans(device: torch.device) -> AbstractContextManager[dict[str, str]]:
    """During a warmup, measures the plans of its buckets, or reads them from a file.

    Yields notes for the engine's report, complete on exit. Does nothing on devices without these
    ops.
    """
    if device.type != "cuda" or why_not() is not None:
        return nullcontext({})
    from compiled_attn.ops.triton.plan_file import plans_file, saved_plans

    own = torch.empty(0, device=device).device  # "cuda" has no index, its tensors do
    return saved_plans(plans_file(own), own)


def _op(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        module = import_module(f"compiled_attn.ops.triton.{_MODULES[name]}")  # imports Triton
        return getattr(module, name)(*arguments, **options)

    return call
