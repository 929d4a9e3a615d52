"""Lengths of drafts are those that yield most, by times and shares that are measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from compiled_attn.engine.speculation.gain import Acceptance, StepCosts, lengths_of_drafts
from compiled_attn.step import StepLimits, TableLayout

BUCKETS = TableLayout(100, 4, 10).ladder(StepLimits(64, 8, 10, 99, 4), 24)
BUCKETS = BUCKETS.with_cost(lambda bucket: float(sum(bucket.sizes)))


def best_rate(rows, chances, longest, seconds, extra) -> float:
    """By trying all lengths."""
    return max(
        (rows + sum(p**place for p, n in zip(chances, lengths, strict=True)
                    for place in range(1, n + 1)))
        / (seconds[sum(lengths)] + extra[max(lengths)])
        for lengths in itertools.product(*(range(n + 1) for n in longest))
        if sum(lengths) < len(seconds)
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_no_other_lengths_yield_more(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    rows, longest = count + int(rng.integers(3)), rng.integers(1, 4, count).tolist()
    chances = rng.random(count).tolist()
    seconds = np.cumsum(rng.random(1 + int(rng.integers(1, 12))) * rng.random()) + 1
    lengths = lengths_of_drafts(rows, chances, longest, seconds)
    assert all(0 <= n <= most for n, most in zip(lengths, longest, strict=True))
    gained = sum(
        p**place for p, n in zip(chances, lengths, strict=True) for place in range(1, n + 1)
    )
    rate, plain = (rows + gained) / seconds[sum(lengths)], rows / seconds[0]
    best = best_rate(rows, chances, longest, seconds, np.zeros(9))
    assert rate == pytest.approx(best) or (not any(lengths) and best < 1.03 * plain)


def test_drafts_that_take_long_to_make_are_shorter_or_not_made():
    seconds = np.ones(9)
    assert lengths_of_drafts(1, [0.9], [8], seconds) == [8]
    (some,) = lengths_of_drafts(1, [0.9], [8], seconds, np.arange(9) * 0.3)
    assert 0 < some < 8
    assert lengths_of_drafts(1, [0.9], [8], seconds, np.arange(9) * 1.0) == [0]


def test_estimates_follow_the_measured_times():
    runs = {bucket: 0.001 * bucket["tokens"] for bucket in BUCKETS}
    costs = StepCosts(BUCKETS, runs)
    assert costs.most == 40 and not costs.is_known(1)
    one, five = (BUCKETS.pick(tokens=n, requests=n) for n in (1, 5))
    costs.add(one, 0.01)  # ten times as long as in the warmup: so are all others
    assert costs.is_known(1) and not costs.is_known(5)
    assert costs.seconds(1, 4)[[0, 4]].tolist() == pytest.approx([0.01, 0.05])
    for _ in range(100):
        costs.add(five, 0.02)
    assert costs.seconds(5, 0)[0] == pytest.approx(0.02, rel=0.01)
    costs.add(five, 100.0)  # another process
    assert costs.seconds(5, 0)[0] < 0.03
    for _ in range(600):
        costs.add(one, 0.01)
    assert costs.seconds(1, 4)[4] == pytest.approx(0.05, rel=0.01)  # not in use any more


def test_buckets_of_prompts_are_not_counted():
    costs = StepCosts(BUCKETS, {})
    costs.add(BUCKETS.pick(tokens=64, requests=1), 5.0)
    assert costs.seconds(1, 3).tolist() == [1.0] * 4 and not costs.is_known(1)


def test_shares_forget():
    share = Acceptance()
    assert share.probability(0.7) == 0.7
    for _ in range(50):
        share.add(4, 0)
    assert share.probability(0.7) < 0.1
    for _ in range(30):
        share.add(4, 4)
    assert share.probability(0.1) > 0.9
