"""Learned buckets: never worse than the ladder on any need, better on what was recorded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Axis, BucketOverflow, BucketSpace, explicit, exponential, linear
from graphs.buckets.learned import buckets_for


def paid(space, counts):
    """Total cost of the picked buckets, and of the needs that none holds: nothing."""
    total = 0.0
    for sizes, count in counts.items():
        try:
            bucket = space.pick(**dict(zip(space.names, sizes, strict=True)))
        except BucketOverflow:
            continue
        total += count * space.cost(bucket)
    return total


def drifting(rng, ladder, kind, steps=300):
    """Counts of recorded needs, and of those that came later, of traffic that drifts."""
    top = np.array([axis.high for axis in ladder.axes])

    def drawn(center, spread):
        points = center * np.exp(spread * rng.standard_normal((steps, len(top))))
        points = np.clip(np.ceil(points), 0, np.ceil(top * 1.1)).astype(int)
        rows, times = np.unique(points, axis=0, return_counts=True)
        return dict(zip(map(tuple, rows.tolist()), times.tolist(), strict=True))

    center = top * rng.uniform(0.05, 0.6, len(top))
    moved = {
        "same": center,
        "shifted": center * rng.uniform(0.3, 3.0, len(top)),
        "swapped": top - center,
        "uniform": top / 2,
    }[kind]
    return drawn(center, 0.2), drawn(moved, 1.0 if kind == "uniform" else 0.2)


LADDERS = [
    linear(tokens=(1, 32, 256)),
    exponential(tokens=(1, 512, 8)),
    exponential(rows=(1, 32, 6), length=(16, 512, 6)),
    exponential(rows=(1, 32, 6), length=(16, 512, 6)).with_cost(
        lambda b: 500 + b["rows"] * (40 + b["length"])
    ),
    exponential(tokens=(1, 256, 4), shared=(0, 64, 3), unique=(0, 256, 3), logits=(0, 32, 2)),
]


@pytest.mark.parametrize("kind", ["same", "shifted", "swapped", "uniform"])
@pytest.mark.parametrize("which", range(len(LADDERS)))
def test_no_traffic_is_padded_more_than_by_the_ladder(which, kind):
    ladder, rng = LADDERS[which], np.random.default_rng(which)
    for _ in range(3):
        recorded, later = drifting(rng, ladder, kind)
        learned = buckets_for(recorded, ladder, len(ladder) + 6)
        assert len(learned) <= len(ladder) + 6 and set(ladder) <= set(learned)
        assert learned.largest == ladder.largest and learned.axes == ladder.axes
        assert paid(learned, later) <= paid(ladder, later)
        assert paid(learned, recorded) < paid(ladder, recorded)
        if kind == "same":
            assert paid(learned, later) < paid(ladder, later)


needs = st.dictionaries(
    st.tuples(st.integers(0, 14), st.integers(0, 14)), st.integers(1, 9), max_size=8
)
spaces = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(needs, spaces, st.integers(0, 3))
def test_every_need_pays_at_most_what_it_pays_in_the_ladder(counts, sizes, more):
    top = tuple(map(max, zip(*sizes, strict=True)))
    base = explicit(("a", "b"), [*sizes, top]).with_cost(lambda b: 2 + b["a"] * (3 + b["b"]))
    learned = buckets_for(counts, base, len(base) + more)
    assert len(learned) <= len(base) + more
    for need in itertools.product(range(13), range(13)):
        try:
            own = base.cost(base.pick(a=need[0], b=need[1]))
        except BucketOverflow:
            with pytest.raises(BucketOverflow):
                learned.pick(a=need[0], b=need[1])
        else:
            assert learned.cost(learned.pick(a=need[0], b=need[1])) <= own


@settings(max_examples=60)
@given(
    st.dictionaries(st.integers(1, 40).map(lambda n: (n,)), st.integers(1, 9), min_size=1),
    st.integers(1, 2),
)
def test_it_saves_most_of_what_the_best_buckets_save(counts, more):
    base = explicit([Axis("n", 0, 40)], [10, 40])
    learned = buckets_for(counts, base, 2 + more)
    trials = itertools.combinations(range(1, 41), more)
    best = min(paid(base.with_buckets([(n,) for n in trial]), counts) for trial in trials)
    own = paid(base, counts)
    assert own - paid(learned, counts) >= 0.63 * (own - best) - 1e-3 * own
    if more == 1:
        assert paid(learned, counts) <= best + 1e-3 * own


def test_many_distinct_sizes_are_planned_quickly_and_well():
    rng = np.random.default_rng(0)
    ladder = exponential(rows=(1, 64, 7), length=(16, 4096, 9))
    points = np.ceil(np.exp(rng.normal((2.5, 6.5), (0.5, 0.6), (9000, 2)))).astype(int)
    counts = {tuple(row): 1 for row in points.tolist()}
    learned = buckets_for(counts, ladder, len(ladder) + 16)
    assert paid(learned, counts) < 0.85 * paid(ladder, counts)


def test_a_ladder_of_more_buckets_than_groups_of_needs():
    ladder = explicit(["n"], range(10, 20_010, 10))
    counts = {(n,): 1 for n in range(1, 20_001)} | {(11,): 10**6}
    learned = buckets_for(counts, ladder, len(ladder) + 1)
    assert learned.pick(n=11)["n"] == 11
    corners = explicit(("a", "b"), [(a, b) for a in range(0, 900, 30) for b in range(0, 900, 30)])
    pairs = {(a, b): 1 for a in range(0, 870, 9) for b in range(0, 870, 9)} | {(31, 31): 10**6}
    more = buckets_for(pairs, corners, len(corners) + 2)
    assert paid(more, pairs) < paid(corners, pairs)


def test_buckets_that_save_next_to_nothing_are_left_out():
    base = explicit(["n"], [10, 100])
    assert buckets_for({(10,): 10**6, (99,): 1}, base, 8) == base
    assert buckets_for({}, base, 8) == base
    assert buckets_for({(500,): 3}, base, 8) == base
    assert buckets_for({(20,): 3}, base, 2) == base


def test_bad_input_is_refused():
    base = explicit(["n"], [10, 100])
    with pytest.raises(ValueError, match="at least the 2 buckets of the ladder, got 1: raise it"):
        buckets_for({(3,): 1}, base, 1)
    with pytest.raises(ValueError, match=r"expected sizes of n, got \(3, 4\): record them again"):
        buckets_for({(3, 4): 1}, base, 4)


def test_more_buckets_are_added_with_the_same_axes_and_cost():
    base = BucketSpace([Axis("n", 1, 64)], [(8,), (64,)], lambda b: -(-b["n"] // 8))
    more = base.with_buckets([(16,), (8,)])
    assert [b["n"] for b in more] == [8, 64, 16]
    assert more.axes == base.axes and more.cost(more.pick(n=9)) == 2
    with pytest.raises(ValueError, match="above the axis's 64"):
        base.with_buckets([(65,)])
