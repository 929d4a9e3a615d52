"""Chooses how OpenMP threads wait for each other, before torch is loaded."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from graphs.cgroups import cpu_quota

__all__ = ["busy_processors", "choose_waiting", "why_slow"]

_STAT = Path("/proc/stat")
_WINDOW_SECONDS = 0.2
_CROWDED = 0.3
"""How many processors too few make passive waiting faster, see docs/guide/scale_out.md."""
_CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def choose_waiting(threads: int | None, work: Callable[[], object] | None = None) -> str:
    """Makes OpenMP threads sleep while they wait, if other processes need the processors.

    Threads that spin take a processor from the thread they wait for, and spend the quota of a
    container. OpenMP reads ``OMP_WAIT_POLICY`` once, when torch is loaded; likewise
    ``OMP_NUM_THREADS``, which is set to the quota, rounded up, if that is less than the processors.
    Variables that the user has set stay.

    Args:
        threads: that will compute; None: as many as processors, or ``OMP_NUM_THREADS``.
        work: is done while the load is measured, if it is; must not load torch.

    Returns:
        the choice and its reason for the report: ``passive: others keep 1.0 of 2 processors busy``;
        with a quota, ``; a quota gives 1.5 of 2 processors``.
    """
    quota, processors = cpu_quota(), len(_usable())
    if quota is None or quota >= processors:
        return _chosen(threads, processors, work)
    if "torch" not in sys.modules and not (threads or _asked_of_openmp()):
        os.environ["OMP_NUM_THREADS"] = str(max(1, math.ceil(quota)))
    return f"{_chosen(threads, quota, work)}; a quota gives {quota:.3g} of {processors} processors"


def why_slow(threads: int, work: Callable[[], object] | None = None) -> str:
    """Describes why spinning threads are slow here, with the remedy; "" if they are not.

    For a process that has already loaded torch, where `choose_waiting` is too late. ``work``: see
    `busy_processors`.
    """
    if threads == 1 or any(name in os.environ for name in _CHOSEN_BY_USER):
        return ""
    processors, busy = len(_usable()), busy_processors(work=work)
    if busy is None or not _is_crowded(threads, processors - busy):
        return ""
    return (
        f"others keep {busy:.1f} of {processors} processors busy, where {threads} threads that "
        "spin while they wait are several times slower: set OMP_WAIT_POLICY=PASSIVE before Python "
        "starts, or torch.set_num_threads(1)"
    )


def _chosen(threads: int | None, given: float, work: Callable[[], object] | None) -> str:
    """Chooses for a process that may use the time of ``given`` processors."""
    for name in _CHOSEN_BY_USER:
        if name in os.environ:
            return f"as set: {name}={os.environ[name]}"
    if "torch" in sys.modules:
        return "as it was when torch was loaded"
    return _measured(threads or _asked_of_openmp() or len(_usable()), given, work)


def _measured(threads: int, given: float, work: Callable[[], object] | None) -> str:
    if threads == 1:
        return "none: one thread"
    processors, busy = len(_usable()), busy_processors(work=work)
    if busy is None:
        return "active: this system does not report how busy it is"
    is_crowded = _is_crowded(threads, min(given, processors - busy))
    if is_crowded:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    choice = "passive" if is_crowded else "active"
    return f"{choice}: others keep {busy:.1f} of {processors} processors busy"


def _is_crowded(threads: int, free: float) -> bool:
    return threads > free + _CROWDED


def busy_processors(
    seconds: float = _WINDOW_SECONDS, *, work: Callable[[], object] | None = None
) -> float | None:
    """Measures for some seconds how many of this process's processors others keep busy.

    ``work`` is done meanwhile; then the time of this process does not count. None: the system does
    not report it.
    """
    before, own, began = _ticks(), time.process_time(), time.perf_counter()
    if work is not None:
        work()
    time.sleep(max(0.0, began + seconds - time.perf_counter()))
    after = _ticks()
    used = 0.0
    if work is not None:
        used = (time.process_time() - own) / (time.perf_counter() - began)
    both_times = zip(before, after, strict=False)  # a processor may go offline meanwhile
    spent = [[b - a for a, b in zip(*both, strict=True)] for both in both_times]
    shares = [busy / (busy + idle) for busy, idle in spent if busy + idle]
    return max(0.0, sum(shares) - used) if shares else None


def _ticks() -> list[tuple[int, int]]:
    """Busy and idle time of each usable processor so far."""
    try:
        lines = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines()]
    except OSError:
        return []
    names, found = {f"cpu{number}" for number in _usable()}, []
    for name, *fields in lines:
        if name in names:
            # user nice system idle iowait irq softirq steal; guests are counted in user and nice
            user, nice, system, idle, waits, *rest = map(int, fields[:8])
            found.append((user + nice + system + sum(rest), idle + waits))
    return found


def _usable() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _asked_of_openmp() -> int:
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(threads) if threads.isdecimal() else 0
