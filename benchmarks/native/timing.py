"""Interleaved timing: every call once per round, medians over rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def medians(calls: Mapping[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Returns the median seconds of each call; passes the number of the round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)  # compiles, allocates
    for number in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call(number)
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(spent) for name, spent in times.items()}
