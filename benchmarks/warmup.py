"""Prints how long cold warmups take: `python benchmarks/warmup.py [--layers N] [--buckets N]`.

Each run is a process with an empty compile cache; compared runs alternate. Compares a model of
twelve layers, unrolled, with one whose layer is a region that is compiled once.
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

_GOAL = 0.4
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


def measure(layers: int, is_regional: bool, buckets: int) -> float:
    """Time a warmup in this process, without inductor's one-time work (imports, probes)."""
    with torch.no_grad():
        capture(torch.neg, [torch.ones(8)])
    space = linear(tokens=(32, 32, 32 * buckets))
    manager = WarmupManager(Model(layers, is_regional).eval(), space, inputs_of, timed_runs=0)
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


def main() -> None:
    """Print both times and their ratio against the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", nargs=3, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        layers, is_regional, buckets = given.measure
        print(measure(layers, bool(is_regional), buckets))
        return
    pairs = [
        tuple(cold(given.layers, is_regional, given.buckets) for is_regional in (0, 1))
        for _ in range(given.repeat)
    ]
    ratio = statistics.median(after / before for before, after in pairs)
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    state = "reached" if ratio <= _GOAL else "missed"
    print(
        f"regions: {before:.1f} s -> {after:.1f} s, ratio {ratio:.2f} (median of {given.repeat}); "
        f"goal at most {_GOAL}: {state}"
    )


if __name__ == "__main__":
    main()
