"""Interleaved times on a device: a recorded graph of several calls, one wait per round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Kernel = Callable[[int], object]
"""One call of a kernel; takes the number of the call."""


def medians(
    kernels: Mapping[str, Kernel], rounds: int, calls: int, device: torch.device
) -> tuple[dict[str, float], list[str]]:
    """Return median seconds per call, and the kernels whose calls the host made on CUDA.

    On CUDA calls are replayed from a graph, as an engine has them, so the time is the device's;
    elsewhere, and where a kernel cannot be recorded, the host makes each call, and the time of a
    short one is the host's.
    """
    times: dict[str, list[float]] = {name: [] for name in kernels}
    runs = {name: _several(kernel, calls, device) for name, kernel in kernels.items()}
    by_host = [name for name, (_, replays) in runs.items() if not replays]
    for _ in range(rounds):
        for name, (run, _) in runs.items():
            wait(device)
            started = time.perf_counter()
            run()
            wait(device)
            times[name].append((time.perf_counter() - started) / calls)
    seconds = {name: statistics.median(spent) for name, spent in times.items()}
    return seconds, by_host if device.type == "cuda" else []


def wait(device: torch.device) -> None:
    """Waits for a device; a CPU has nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def host_seconds(kernel: Kernel, calls: int, device: torch.device) -> float:
    """Seconds that the host takes to make a call, without waiting for the device."""
    kernel(0)
    wait(device)
    started = time.perf_counter()
    for number in range(calls):
        kernel(number)
    spent = time.perf_counter() - started
    wait(device)
    return spent / calls


def _several(kernel: Kernel, calls: int, device: torch.device) -> tuple[Callable[[], None], bool]:
    """Return a function that makes several calls, and whether it replays them."""

    def run() -> None:
        for number in range(calls):
            kernel(number)

    run()  # compiles, allocates
    if device.type != "cuda":
        return run, False
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        return run, False
    graph.replay()
    return graph.replay, True
