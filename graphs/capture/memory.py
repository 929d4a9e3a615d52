"""Memory in use, and memory that there is: measured rather than guessed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

__all__ = ["bytes_in_use", "machine_bytes"]

_STATM = Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def bytes_in_use(devices: Iterable[torch.device]) -> int:
    """Bytes reserved on the accelerators among `devices`, plus those the process has resident.

    Resident memory is read from /proc, and counts as 0 where there is none.
    """
    accelerators = {device for device in devices if device.type not in ("cpu", "meta")}
    return _resident() + sum(map(_reserved, accelerators))


def machine_bytes() -> int | None:
    """Bytes that this machine has, or its container may use; None where that is unknown."""
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    try:
        return min(there, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return there if there > 0 else None


def _resident() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _reserved(device: torch.device) -> int:
    module = torch.get_device_module(device)
    reserved = getattr(module, "memory_reserved", None)
    return int(reserved(device)) if reserved is not None else 0
