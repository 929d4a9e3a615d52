"""Interleaved times on a device: it is waited for once a form and round, after several calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def medians(
    forms: Mapping[str, Callable[[int], object]], rounds: int, calls: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of a call of each form, which is given the number of the call.

    The host must be ahead of the device for this to be the device's time: a call of less than
    about 20 us is the host's.
    """
    times: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        form(0)  # compiles, allocates
    for number in range(rounds):
        for name, form in forms.items():
            torch.accelerator.synchronize(device)
            started = time.perf_counter()
            for call in range(calls):
                form(number * calls + call)
            torch.accelerator.synchronize(device)
            times[name].append((time.perf_counter() - started) / calls)
    return {name: statistics.median(spent) for name, spent in times.items()}
