"""Limits of the control groups of this process, as in a container or a service.

Does not import torch, as the number of threads is set before torch is loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cgroup_folders", "cpu_quota", "lines_of", "number_in", "usable_cores"]

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Number of processors that this process may use: its affinity, but at most its quota.

    A quota of 1.5 processors counts as two.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = cpu_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def cpu_quota() -> float | None:
    """CPU quota of this process in processors, None if unlimited."""
    found = (_quota(version, folder) for version, folder in cgroup_folders("cpu"))
    return min((quota for quota in found if quota is not None), default=None)


def cgroup_folders(controller: str) -> Iterator[tuple[int, Path]]:
    """Version (1 or 2) and folder of each group of this process, from the innermost outwards.

    In a container only its own group may be visible, at the root instead of at its path.

    Args:
        controller: such as ``memory``.
    """
    for line in lines_of(_MEMBERSHIP):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        inner = root / path.strip().lstrip("/")
        for folder in (inner, *inner.parents):
            yield 1 if controllers else 2, folder
            if folder == root:
                break


def number_in(path: Path) -> int | None:
    """The number in a file; None if it is missing, negative or ``max``."""
    words = "".join(lines_of(path)).strip()
    return int(words) if words.isdigit() else None


def lines_of(path: Path) -> list[str]:
    """Lines of a file, empty if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []


def _quota(version: int, folder: Path) -> float | None:
    if version == 1:
        spent, period = (number_in(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    else:
        words = "".join(lines_of(folder / "cpu.max")).split()
        spent, period = (int(w) if w.isdigit() else None for w in (*words, "", "")[:2])
    return spent / period if spent and period else None
