"""Saves measured plans in a file, per kind of device, versions and kernel sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton

from compiled_attn.ops import providers
from compiled_attn.ops.cpu.libraries import own_folder
from compiled_attn.ops.triton.autotune import measuring
from compiled_attn.ops.triton.plans import PLANS, Exported, Plans, provider_notes
from graphs.errors import StoreBusy, StoreError
from graphs.files import write_whole
from graphs.store.lock import locked

__all__ = ["plans_file", "saved_plans"]

_LOCK_SECONDS = 10.0


@contextmanager
def saved_plans(
    file: Path | None, device: torch.device, plans: Plans = PLANS
) -> Iterator[dict[str, str]]:
    """During a warmup, uses the file's plans, measures others and adds them to the file.

    Yields notes for the engine's report, complete on exit.

    Args:
        file: see `plans_file`; None or not writable: measures at each start.
        device: device of the plans.
        plans: plans used by the ops.
    """
    plans.adopt(_read(file), device)
    notes: dict[str, str] = {}
    try:
        with measuring(plans):
            yield notes
    finally:
        notes |= provider_notes(plans.kinds)
        _add(file, plans.export(device))


def plans_file(device: torch.device) -> Path | None:
    """Returns the plan file of a CUDA device; None if it cannot be saved."""
    folders = Path(__file__).parent, Path(providers.__file__).parent
    sources = sorted(path for each in folders for path in each.glob("*.py"))
    versions = [torch.__version__, triton.__version__]
    versions += [each.version() for each in providers.PROVIDERS.values()]
    factors = [torch.cuda.get_device_name(device), *versions]
    texts = [*(factor.encode() for factor in factors), *(path.read_bytes() for path in sources)]
    try:
        folder = own_folder(None)
    except (OSError, StoreError):
        return None
    key = hashlib.sha256(b"\0".join(texts)).hexdigest()
    return folder / f"triton-{key[:32]}.plans.json"


def _add(file: Path | None, measured: dict[str, Exported]) -> None:
    """Merges plans with what other processes have written meanwhile."""
    if file is None or not measured:
        return
    try:
        with locked(file.with_suffix(".lock"), shared=False, seconds=_LOCK_SECONDS):
            known = dict(sorted((_read(file) | measured).items()))
            write_whole(file, json.dumps(known, indent=1).encode())
    except (OSError, StoreBusy):
        return  # read-only folders must work too


def _read(file: Path | None) -> dict[str, Exported]:
    """The plans of a file; none if it is corrupt."""
    try:
        known = json.loads(file.read_text()) if file else {}
        Plans().adopt(known, torch.device("cpu"))
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
    return dict(known)
