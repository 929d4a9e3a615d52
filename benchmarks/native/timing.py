"""Interleaved timing: every form once a round, medians over rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def medians(forms: Mapping[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each form; a form is called with the number of its round."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        form(0)  # compiles, allocates
    for number in range(rounds):
        for name, form in forms.items():
            started = time.perf_counter()
            form(number)
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(spent) for name, spent in times.items()}
