"""Interleaved timing of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

__all__ = ["medians"]


def medians(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the median seconds of each call; calls alternate, so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, spent in zip(calls, times, strict=True):
            started = clock()
            call()
            spent.append(clock() - started)
    return [statistics.median(each) for each in times]
