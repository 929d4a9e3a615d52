"""Sampling of a step: all rows at once, and row by row from a sorted row.

    python benchmarks/sampling.py [--threads 2] [--vocab 128256]

Logits of a normal distribution, float32. Milliseconds, medians, one process, in turns; `sorted` is
the definition: each row sorted in float64, cut, and drawn from (greedy: `torch.max` of each row).
Both give the same tokens, which is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from compiled_attn.engine import SamplingParams, sample
from graphs.report.surroundings import machine

CASES = {
    "greedy": SamplingParams(),
    "temperature, top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "temperature, top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "temperature": SamplingParams(temperature=0.8),
}


def by_sorting(logits: Tensor, seeds: range, params: SamplingParams) -> list[int]:
    """The tokens, row by row."""
    best, tokens = logits.max(-1)
    assert best.isfinite().all()
    if not params.temperature:
        return [int(token) for token in tokens]
    return [_of_sorted(row, seed, params) for row, seed in zip(logits, seeds, strict=True)]


def _of_sorted(logits: Tensor, seed: int, params: SamplingParams) -> int:
    logits = logits.double()
    ordered, tokens = torch.sort(
        (logits - logits.max()) / params.temperature, descending=True, stable=True
    )
    if params.top_k:
        ordered = ordered[: params.top_k]
    probabilities = torch.softmax(ordered, -1)
    kept = probabilities[probabilities.cumsum(-1) - probabilities < params.top_p].cumsum(-1)
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=0)).random()
    place = int(torch.searchsorted(kept, uniform * float(kept[-1]), right=True))
    return int(tokens[min(place, len(kept) - 1)])


def milliseconds(function: Callable[[], list[int]]) -> tuple[float, list[int]]:
    """Time of a call, and what it gave."""
    started = time.perf_counter()
    result = function()
    return (time.perf_counter() - started) * 1e3, result


def main() -> None:
    """Prints a row for each way to sample and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"# {machine()['cpu']}, {options.threads} threads, vocabulary {options.vocab}")
    print(f"{'sampling':34} {'rows':>5} {'ms':>8} {'sorted / here':>14}")
    for count in options.rows:
        logits = 3 * torch.randn(count, options.vocab)
        for name, params in CASES.items():
            many = [replace(params, seed=seed) for seed in range(count)]
            at_once = partial(sample, logits, many, [0] * count)
            one_by_one = partial(by_sorting, logits, range(count), params)
            pairs = []
            for _ in range(options.rounds):
                (here, ours), (there, theirs) = milliseconds(at_once), milliseconds(one_by_one)
                assert ours == theirs
                pairs.append((here, there / here))
            ms, ratio = (statistics.median(each) for each in zip(*pairs, strict=True))
            print(f"{name:34} {count:5} {ms:8.2f} {ratio:14.1f}", flush=True)


if __name__ == "__main__":
    main()
