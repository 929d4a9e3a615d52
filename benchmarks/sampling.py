"""Sampling of a step: all rows at once, and row by row from a sorted row.

    python benchmarks/sampling.py [--threads 2] [--vocab 128256]

Logits of a normal distribution, float32; each request has a text of 1,000 tokens, half of them
generated, which were counted in an earlier step. Milliseconds, medians, one process, in turns;
`sorted` is the reference: each row sorted in float64, cut, and sampled from (greedy: `torch.max` of
each row). Both give the same tokens, which is asserted. Last the masks of grammars, which are
applied to logits in place (xgrammar's time to fill them is not in it), and row by row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine import Grammar, SamplingParams
from compiled_attn.engine.constraint import Constraint, constrain
from compiled_attn.engine.logit_rules import LogitRules
from compiled_attn.engine.sampler import SampleRequest, sample_requests
from graphs.report.surroundings import machine

TEXT = 1000
CASES = {
    "greedy": SamplingParams(),
    "temperature, top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "the same, min-p 0.05": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05),
    "the same, repetition 1.1": SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1
    ),
    "temperature, top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "temperature": SamplingParams(temperature=0.8),
    "temperature, min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "temperature of 3": SamplingParams(temperature=3.0),
}


def by_sorting(
    logits: Tensor, seeds: range, params: SamplingParams, texts: list[list[int]]
) -> list[int]:
    """The tokens, row by row."""
    best, tokens = logits.max(-1)
    assert best.isfinite().all()
    if not params.temperature:
        return [int(token) for token in tokens]
    rows = zip(logits, seeds, texts, strict=True)
    return [_of_sorted(_penalised(row, params, text), seed, params) for row, seed, text in rows]


def _penalised(logits: Tensor, params: SamplingParams, text: list[int]) -> Tensor:
    seen, penalty = torch.tensor(text).unique(), params.repetition_penalty
    values = logits[seen]
    values = torch.where(values > 0, values / penalty, values * penalty)
    return logits.index_copy(0, seen, values)


def _of_sorted(logits: Tensor, seed: int, params: SamplingParams) -> int:
    logits = logits.double()
    ordered, tokens = torch.sort(
        (logits - logits.max()) / params.temperature, descending=True, stable=True
    )
    if params.top_k:
        ordered = ordered[: params.top_k]
    probabilities = torch.softmax(ordered, -1)
    likely = probabilities[probabilities.cumsum(-1) - probabilities < params.top_p]
    sums = likely[likely >= params.min_p * likely[0]].cumsum(-1)
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=TEXT // 2)).random()
    at = int(torch.searchsorted(sums, uniform * float(sums[-1]), right=True))
    return int(tokens[min(at, len(sums) - 1)])


class Masks:
    """Grammars of which each allows a random share of the tokens."""

    def __init__(self, rows: int, vocab: int, share: float) -> None:
        allowed = np.random.default_rng(0).random((rows, -(-vocab // 32) * 32)) < share
        self.allowed = torch.from_numpy(allowed[:, :vocab])
        self._masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)

    def compiled(self, grammar: Grammar) -> Callable[[], Masks]:
        return lambda: self

    def is_completed(self) -> bool:
        return False

    def accept_token(self, token_id: int) -> bool:
        return True

    def masks(self, matchers: Sequence[object]) -> NDArray[np.int32]:
        return self._masks


def masked(logits: Tensor, rounds: int) -> None:
    """Prints a row for the masks of grammars that allow few tokens, and most."""
    count, vocab = logits.shape
    for name, share in {"few": 0.001, "nearly all": 0.999}.items():
        masks, pairs = Masks(count, vocab, share), []
        constraints = [Constraint(masks, Grammar.regex("a"), 1, {0, 1}) for _ in range(count)]
        texts = [[5] * TEXT] * count
        constrain(logits.clone(), constraints, texts)  # reads the tokens of the texts
        for _ in range(rounds):
            ours, theirs = logits.clone(), logits.clone()
            here, _ = milliseconds(lambda: constrain(ours, constraints, texts) or [])  # noqa: B023
            there, _ = milliseconds(lambda: _by_rows(theirs, masks.allowed))  # noqa: B023
            theirs[:, :2] = -torch.inf
            assert torch.equal(ours, theirs)
            pairs.append((here, there / here))
        ms, ratio = (statistics.median(each) for each in zip(*pairs, strict=True))
        print(f"{f'masks, {name} allowed':34} {count:5} {ms:8.2f} {ratio:14.1f}", flush=True)


def _by_rows(logits: Tensor, allowed: Tensor) -> list[Any]:
    for row, may in zip(logits, allowed, strict=True):
        row[~may] = -torch.inf
    return []


def milliseconds(function: Callable[[], list[Any]]) -> tuple[float, list[Any]]:
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
        texts = torch.randint(options.vocab, (count, TEXT)).tolist()
        for name, params in CASES.items():
            many = [replace(params, seed=seed) for seed in range(count)]
            draws = [
                SampleRequest(row, each, TEXT // 2, LogitRules(each, TEXT // 2, ()), texts[row])
                for row, each in enumerate(many)
            ]
            at_once = partial(sample_requests, logits, draws)
            at_once()  # counts the tokens of the texts, as they are known in an engine
            one_by_one = partial(by_sorting, logits, range(count), params, texts)
            pairs = []
            for _ in range(options.rounds):
                (here, ours), (there, theirs) = milliseconds(at_once), milliseconds(one_by_one)
                assert ours == theirs
                pairs.append((here, there / here))
            ms, ratio = (statistics.median(each) for each in zip(*pairs, strict=True))
            print(f"{name:34} {count:5} {ms:8.2f} {ratio:14.1f}", flush=True)
        masked(logits, options.rounds)


if __name__ == "__main__":
    main()
