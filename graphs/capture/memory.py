"""Memory in use and memory available, as the system reports them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from graphs.cgroups import cgroup_folders, lines_of, number_in

__all__ = ["bytes_in_use", "free_bytes", "machine_bytes"]

_PROC = Path("/proc")
_CPU = torch.device("cpu")


def bytes_in_use(devices: Iterable[torch.device]) -> int:
    """Bytes reserved on the accelerators among `devices`, plus the process's resident memory.

    Resident memory comes from /proc; it counts as 0 where there is none.
    """
    accelerators = {device for device in devices if device.type not in ("cpu", "meta")}
    return _resident() + sum(map(_reserved, accelerators))


def machine_bytes(device: torch.device = _CPU) -> int | None:
    """Bytes of memory of a device, or of this machine or its container; None: unknown."""
    if device.type != "cpu":
        return _device_bytes(device)[1]
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return min([there, *(group.limit for group in _groups())]) if there > 0 else None


def free_bytes(device: torch.device = _CPU) -> int | None:
    """Bytes that this process may still take on a device without swapping; None: unknown.

    On the CPU, what the system reports as available, limited by the process's container.
    """
    if device.type != "cpu":
        return _device_bytes(device)[0]
    available = _number_of(_PROC / "meminfo", "MemAvailable:")
    if available is None:
        return None
    left = [group.limit - group.used for group in _groups()]
    return max(0, min([available * 1024, *left]))


class _Group(NamedTuple):
    """A memory cgroup, in bytes; inactive file pages do not count as used."""

    limit: int
    used: int


_VERSIONS = {  # files of limit and use, and the row of inactive file pages
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _groups() -> Iterator[_Group]:
    """The memory cgroups of this process that have a limit, up to the outermost."""
    for version, folder in cgroup_folders("memory"):
        limit, use, idle = _VERSIONS[version]
        most, used = number_in(folder / limit), number_in(folder / use)
        if most is not None and used is not None:
            yield _Group(most, used - (_number_of(folder / "memory.stat", idle) or 0))


def _resident() -> int:
    words = " ".join(lines_of(_PROC / "self" / "statm")).split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0


def _reserved(device: torch.device) -> int:
    module = torch.get_device_module(device)
    reserved = getattr(module, "memory_reserved", None)
    return int(reserved(device)) if reserved is not None else 0


def _device_bytes(device: torch.device) -> tuple[int, int] | tuple[None, None]:
    mem_get_info = getattr(torch.get_device_module(device), "mem_get_info", None)
    if mem_get_info is None:
        return None, None
    free, total = mem_get_info(device)
    return int(free), int(total)


def _number_of(path: Path, name: str) -> int | None:
    rows = (line.split() for line in lines_of(path))
    return next((int(row[1]) for row in rows if len(row) > 1 and row[0] == name), None)
