"""Threads that spin or sleep while they wait, alone and next to a process that keeps a core busy.

    python benchmarks/threads.py [--threads 2]

A step is 24 linear layers of 4 rows; each way of waiting runs in its own process, as OpenMP reads
it once. Stop other programs first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

SECONDS = 1.2
VARIABLES = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"
WAYS = ({}, {"OMP_WAIT_POLICY": "PASSIVE"}, {"GOMP_SPINCOUNT": "1000"})


def steps_a_second(threads: int) -> float:
    """Measures this process."""
    torch.set_num_threads(threads)
    layers = nn.Sequential(*([nn.Linear(512, 1536), nn.Linear(1536, 512)] * 12))
    x, steps = torch.randn(4, 512), 0
    with torch.no_grad():
        for _ in range(20):
            layers(x)
        started = time.perf_counter()
        while (spent := time.perf_counter() - started) < SECONDS:
            layers(x)
            steps += 1
    return steps / spent


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Runs busy processes while the context is open."""
    command = [sys.executable, "-c", "while True: 0"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(threads: int, way: dict[str, str]) -> float:
    """Measures a child process."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES} | way
    command = [sys.executable, __file__, "--threads", str(threads), "--child"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Prints steps per second of each way of waiting, alone and next to a busy process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(steps_a_second(options.threads))
        return
    print(f"# float32, 24 linear layers of 4 rows, torch {torch.__version__}, steps per second")
    print(f"{'threads':>7}  {'waiting':24} {'alone':>7} {'shared':>7}")
    for threads, way in [(1, {}), *((options.threads, way) for way in WAYS)]:
        alone = measured(threads, way)
        with neighbours(1):
            shared = measured(threads, way)
        name = " ".join(map("=".join, way.items())) or "by default"
        print(f"{threads:7}  {name:24} {alone:7.0f} {shared:7.0f}", flush=True)


if __name__ == "__main__":
    main()
