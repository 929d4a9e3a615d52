"""Prints how long cold warmups take: `python benchmarks/warmup.py [--buckets N] [--repeat N]`.

Each run is a process with an empty compile cache; compared runs alternate. First one bucket of a
model of twelve layers, unrolled and with the layer as a region that is compiled once; then the
buckets of a small transformer compiled by one process and by two. Inductor starts C++ compilers on
all cores, so one process is compared both with that and without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch import Tensor, nn

from graphs import Bucket, WarmupManager, capture, linear

_GOALS = {"workers": 0.6, "regions": 0.4}
_WIDTH = 64


class Layer(nn.Module):
    """Attention over the tokens of a step, and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, width] -> [T, width]``."""
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.t() * _WIDTH**-0.5, dim=-1)
        x = x + self.out(weights @ value)
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        result: Tensor = x + self.down(torch.nn.functional.silu(gate) * up)
        return result


class Model(nn.Module):
    """A stack of layers, each optionally a region."""

    def __init__(self, layers: int, is_regional: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self._call = _region if is_regional else _plain

    def forward(self, x: Tensor) -> Tensor:
        """``[T, width] -> [T, width]``."""
        for layer in self.layers:
            x = self._call(layer, x)
        return x


def _plain(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


_region = torch.compiler.nested_compile_region(_plain)


def inputs_of(bucket: Bucket) -> list[Tensor]:
    """The rows of a step."""
    return [torch.ones(bucket.tokens, _WIDTH)]


def measure(
    layers: int, is_regional: bool, buckets: int, workers: int, is_prepared: bool, threads: int
) -> float:
    """Time a warmup in this process.

    With `is_prepared`, inductor's one-time work (imports, probes, headers) is not counted.
    `threads` compile the C++ of one graph, 0: inductor's default.
    """
    if threads:
        torch._inductor.config.compile_threads = threads
    if is_prepared:
        with torch.no_grad():
            capture(torch.neg, [torch.ones(8)])
    space = linear(tokens=(32, 32, 32 * buckets))
    manager = WarmupManager(
        Model(layers, is_regional).eval(), space, inputs_of, workers=workers, timed_runs=0
    )
    start = time.perf_counter()
    report = manager.warmup()
    seconds = time.perf_counter() - start
    if len(report.captured) != buckets:
        raise RuntimeError(str(report))
    return seconds


def cold(*arguments: object) -> float:
    """Run `measure` in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--measure", *map(str, arguments)]
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.split()[-1])


def compare(what: str, first: tuple[object, ...], second: tuple[object, ...], repeat: int) -> None:
    """Print both times and their ratio against the goal."""
    pairs = [(cold(*first), cold(*second)) for _ in range(repeat)]
    ratio = statistics.median(after / before for before, after in pairs)
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    goal = _GOALS[what.split(",")[0]]
    state = "reached" if ratio <= goal else "missed"
    print(
        f"{what}: {before:.1f} s -> {after:.1f} s, ratio {ratio:.2f} (median of {repeat}); "
        f"goal at most {goal}: {state}"
    )


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=_GOALS)
    parser.add_argument("--measure", nargs=6, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        layers, is_regional, buckets, workers, is_prepared, threads = given.measure
        print(measure(layers, bool(is_regional), buckets, workers, bool(is_prepared), threads))
        return
    if given.only in (None, "regions"):
        compare("regions", (12, 0, 1, 1, 1, 0), (12, 1, 1, 1, 1, 0), given.repeat)
    if given.only in (None, "workers"):
        shape = (given.layers, 0, given.buckets)
        two = (*shape, 2, 0, 0)
        compare("workers", (*shape, 1, 0, 0), two, given.repeat)
        compare("workers, against one C++ compiler at a time", (*shape, 1, 0, 1), two, given.repeat)


if __name__ == "__main__":
    main()
