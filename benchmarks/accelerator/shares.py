"""Shares of the wall time of an engine's steps, from a profile of the kernels they run."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["KINDS", "kind_of", "shares"]

KINDS = ("attention", "linear", "sampling", "other", "host")
"""``host``: the device (on a CPU: any op) waits for it."""

# Of kernels on a device, and of ops on a CPU; the first match counts.
_PATTERNS = (
    ("attention", r"attend|merge_kernel|write_kernel|paged_attention|flash|fmha|attention"),
    ("sampling", r"argmax|arg_max|greedy|sample|sort|topk|multinomial|cumsum|scan"),
    ("linear", r"gemm|gemv|nvjet|cutlass|cublas|splitk|linear|addmm|\bmm\b|matmul|::mm|quantised"),
)
_COMPILED = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS]


def kind_of(name: str) -> str:
    """The kind of a kernel or an op by its name."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), "other")


def shares(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Runs once under torch's profiler; returns the share of each of `KINDS`, which sum to 1."""
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        started = time.perf_counter()
        run()
        torch.accelerator.synchronize(device) if on_device else None
        wall = 1e6 * (time.perf_counter() - started)
    return _divided(found.key_averages(), wall, on_device)


def _divided(events: Iterable[Any], wall: float, on_device: bool) -> dict[str, float]:
    spent: Counter[str] = Counter()
    for event in events:
        micros = event.self_device_time_total if on_device else event.self_cpu_time_total
        spent[kind_of(event.key)] += micros
    busy = sum(spent.values())
    whole = max(wall, busy)  # kernels of several streams may overlap
    spent["host"] = whole - busy
    return {kind: spent[kind] / whole for kind in KINDS}
