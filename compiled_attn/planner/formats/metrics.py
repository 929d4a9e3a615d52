"""Reads demand from vLLM's Prometheus histograms.

``vllm:iteration_tokens_total`` counts steps by their tokens between fixed bounds (1, 8, 16, 32, ...
16384), with their sum. The sizes between two bounds are unknown and modelled by a power law with
the mean of the sum. ``vllm:request_prompt_tokens`` and ``vllm:request_generation_tokens`` count
lengths (1, 2, 5, 10, 20, 50, ...), but not which prompt had which output, when it arrived, or what
it shared with others: requests sampled from them are independent of each other.

As in vLLM 0.32.0 and 0.33.0: ``vllm/v1/metrics/loggers.py``, ``vllm/v1/metrics/buckets.py``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from compiled_attn.errors import TraceError
from compiled_attn.planner import Demand
from compiled_attn.planner.demand import Floats
from compiled_attn.workloads import Arrival

__all__ = ["Histogram", "read_histogram", "sample_requests", "step_tokens"]

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]*)"')
_STEEPEST, _HALVINGS = 40.0, 80
_POINTS = 64  # sizes at most between two bounds

_STEPS = "vllm:iteration_tokens_total"
_PROMPTS, _OUTPUTS = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"


@dataclass(frozen=True)
class Histogram:
    """A Prometheus histogram of whole numbers from 1 on.

    Args:
        name: of the metric.
        bounds: upper bounds, ascending; the last may be infinite.
        counts: between each bound and the one before it.
        total: the sum of all observations.
    """

    name: str
    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    def spread(self, largest: int) -> tuple[list[int], list[float]]:
        """Return sizes and weights: a power law between the bounds, with the mean of the sum.

        ``largest`` replaces the last bound if that is infinite.
        """
        ranges = self._ranges(largest)
        low, high = -_STEEPEST, _STEEPEST
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            sizes, weights = _spread(ranges, middle)
            low, high = (middle, high) if float(sizes @ weights) < self.total else (low, middle)
        sizes, weights = _spread(ranges, low)
        return sizes.astype(np.int64).tolist(), weights.tolist()

    def _ranges(self, largest: int) -> list[tuple[int, int, float]]:
        found, low = [], 1
        for bound, count in zip(self.bounds, self.counts, strict=True):
            high = max(low, largest if math.isinf(bound) else int(bound))
            if count > 0:
                found.append((low, high, count))
            low = high + 1
        return found


def read_histogram(path: Path, name: str) -> Histogram:
    """Read a histogram from a saved ``/metrics`` response, summed over engines and models.

    Raises:
        TraceError: the file cannot be read, or has no such histogram with counts.
    """
    counts: dict[float, float] = {}
    total = 0.0
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read as metrics: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.startswith(name) or (found := _SAMPLE.match(line)) is None:
            continue
        metric, labels, value = found.groups()
        try:
            if metric == f"{name}_sum":
                total += float(value)
            elif metric == f"{name}_bucket" and (bound := _BOUND.search(labels or "")):
                at = float(bound[1])
                counts[at] = counts.get(at, 0.0) + float(value)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
    if not counts or not max(counts.values()) > 0:
        raise TraceError(
            f"{path}: expected the histogram {name} with counts, got none: save what "
            "http://SERVER/metrics gives after the server has served for a while"
        )
    bounds = sorted(counts)
    below = [0.0, *(counts[bound] for bound in bounds)]
    each = [max(0.0, high - low) for low, high in pairwise(below)]
    return Histogram(name, tuple(bounds), tuple(each), total)


def step_tokens(path: Path, largest: int) -> Demand:
    """Return the tokens of steps, at most ``largest``, from ``vllm:iteration_tokens_total``.

    A histogram has no time, so both halves of the demand are the same.
    """
    sizes, weights = read_histogram(path, _STEPS).spread(largest)
    halves = [weight / 2 for weight in weights] * 2
    return Demand(("tokens",), [(size,) for size in sizes * 2], halves)


def sample_requests(path: Path, count: int, context: int, seed: int = 0) -> list[Arrival]:
    """Sample requests of the counted lengths, prompts and outputs independently.

    All arrive at once and share no prefix, as the metrics have neither. Requests longer than
    ``context`` are cut.
    """
    rng = np.random.default_rng(seed)
    lengths = []
    for name in (_PROMPTS, _OUTPUTS):
        sizes, weights = read_histogram(path, name).spread(context)
        shares = np.array(weights) / sum(weights)
        lengths.append(rng.choice(sizes, size=count, p=shares))
    prompts, outputs = lengths
    prompts = np.minimum(prompts, context - 1)
    outputs = np.maximum(1, np.minimum(outputs, context - prompts))
    pairs = zip(prompts.tolist(), outputs.tolist(), strict=True)
    return [Arrival(0.0, prompt, output) for prompt, output in pairs]


def _spread(ranges: list[tuple[int, int, float]], power: float) -> tuple[Floats, Floats]:
    sizes, weights = [], []
    for low, high, count in ranges:
        inside = np.unique(np.linspace(low, high, min(_POINTS, high - low + 1)).round())
        logs = power * np.log(inside / high)
        shares = np.exp(logs - logs.max())
        some = shares > 1e-12 * shares.sum()
        sizes.append(inside[some])
        weights.append(count * shares[some] / shares[some].sum())
    return np.concatenate(sizes), np.concatenate(weights)
