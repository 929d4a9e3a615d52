"""Measured plans in a file: of one kind of device, versions of what computes, and these kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton

from compiled_attn.ops.cpu.build import default_folder
from compiled_attn.ops.triton.autotune import measuring
from compiled_attn.ops.triton.plans import PLANS, Plans
from compiled_attn.ops.varlen import active_implementation
from graphs.errors import StoreBusy, StoreError
from graphs.files import write_whole
from graphs.store.lock import locked

__all__ = ["kept_plans", "plans_file"]

_PATIENCE_SECONDS = 10.0


@contextmanager
def kept_plans(
    file: Path | None, device: torch.device, plans: Plans = PLANS
) -> Iterator[dict[str, str]]:
    """Around a warmup: plans of the file are taken, others measured, and added to the file.

    It gives notes for the engine's report, which are there when it closes.

    Args:
        file: of `plans_file`; None, or one that cannot be written: they are measured at each start.
        device: that they are of.
        plans: those that the ops take.
    """
    plans.adopt(_read(file), device)
    notes: dict[str, str] = {}
    try:
        with measuring(plans):
            yield notes
    finally:
        notes |= plans.varlen.notes()
        _add(file, plans.kept(device))


def plans_file(device: torch.device) -> Path | None:
    """Where the plans of a CUDA device are kept; None: nowhere."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    versions = torch.__version__, triton.__version__
    factors = [torch.cuda.get_device_name(device), *versions, str(active_implementation())]
    texts = [*(factor.encode() for factor in factors), *(path.read_bytes() for path in sources)]
    try:
        folder = default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, StoreError):
        return None
    key = hashlib.sha256(b"\0".join(texts)).hexdigest()
    return folder / f"triton-{key[:32]}.plans.json"


def _add(file: Path | None, measured: dict[str, list[int]]) -> None:
    """Adds plans to those that other processes have written meanwhile."""
    if file is None or not measured:
        return
    try:
        with locked(file.with_suffix(".lock"), shared=False, seconds=_PATIENCE_SECONDS):
            known = dict(sorted((_read(file) | measured).items()))
            write_whole(file, json.dumps(known, indent=1).encode())
    except (OSError, StoreBusy):
        return  # a folder that is only read serves too


def _read(file: Path | None) -> dict[str, list[int]]:
    """The plans of a file; none where it is damaged."""
    try:
        known = json.loads(file.read_text()) if file else {}
        Plans().adopt(known, torch.device("cpu"))
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
    return dict(known)
