"""The default buckets: within the budget, and no legal step without one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.engine.ladder import AXES, StepLimits, default_buckets, step_cost


@given(
    tokens=st.integers(1, 600),
    seqs=st.integers(1, 64),
    context=st.integers(1, 300),
    pool=st.integers(1, 3000),
    graphs=st.integers(1, 40),
)
@settings(deadline=None, max_examples=60)
def test_the_budget_is_kept_and_the_largest_step_has_a_bucket(tokens, seqs, context, pool, graphs):
    seqs = min(seqs, tokens)
    limits = StepLimits(tokens, seqs, context, pool)
    space = default_buckets(limits, graphs)
    assert 1 <= len(space) <= graphs
    shared = limits.shared_blocks
    assert min(context, pool) <= shared <= pool
    largest = space.pick(tokens=tokens, shared=shared, unique=pool, logits=seqs)
    assert largest == space.largest


def test_the_largest_bucket_holds_the_contexts_of_as_many_chunks_as_a_step_has():
    assert StepLimits(256, 32, 256, 2048).shared_blocks == 2048
    assert StepLimits(256, 4, 256, 2048).shared_blocks == 1024
    assert StepLimits(5, 4, 256, 2048).shared_blocks == 512
    assert StepLimits(1, 1, 256, 2048).shared_blocks == 256


def test_more_graphs_mean_less_padding():
    limits = StepLimits(256, 32, 256, 2048)
    need = {"tokens": 250, "shared": 20, "unique": 100, "logits": 9}
    cost = step_cost(1e6, 1e3, 32)
    costs = [
        cost(default_buckets(limits, graphs).with_cost(cost).pick(**need)) for graphs in (1, 12, 24)
    ]
    assert costs[0] > costs[1] > costs[2]


@pytest.mark.parametrize("axis", AXES)
def test_the_cost_grows_on_every_axis(axis):
    cost = step_cost(10.0, 2.0, 4)
    bucket = dict.fromkeys(AXES, 5)
    assert cost({**bucket, axis: 6}) > cost(bucket)
