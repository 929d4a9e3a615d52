"""Steps in parts: a ladder within the budget, and no legal step without a bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.step import ModelWork, PartsLayout, StepLimits

LAYOUT = PartsLayout(2, 32)


@given(
    tokens=st.integers(1, 600),
    seqs=st.integers(1, 64),
    context=st.integers(1, 300),
    pool=st.integers(1, 3000),
    graphs=st.integers(1, 40),
)
def test_the_budget_is_kept_and_the_largest_step_has_a_bucket(tokens, seqs, context, pool, graphs):
    seqs = min(seqs, tokens)
    space = LAYOUT.ladder(StepLimits(tokens, seqs, context, pool), graphs)
    assert 1 <= len(space) <= graphs
    shared = space.largest["shared"]
    assert min(context, pool) <= shared <= pool
    largest = space.pick(tokens=tokens, shared=shared, unique=pool, logits=seqs)
    assert largest == space.largest


@pytest.mark.parametrize(
    ("tokens", "seqs", "shared"), [(256, 32, 2048), (256, 4, 1024), (5, 4, 512), (1, 1, 256)]
)
def test_the_largest_bucket_holds_the_contexts_of_as_many_chunks_as_a_step_has(
    tokens, seqs, shared
):
    assert LAYOUT.ladder(StepLimits(tokens, seqs, 256, 2048), 1).largest["shared"] == shared


def test_more_graphs_mean_less_padding():
    limits = StepLimits(256, 32, 256, 2048)
    need = {"tokens": 250, "shared": 20, "unique": 100, "logits": 9}
    cost = LAYOUT.cost(ModelWork(1e6, 1e3, 1.0))
    spaces = [LAYOUT.ladder(limits, graphs).with_cost(cost) for graphs in (1, 12, 24)]
    costs = [cost(space.pick(**need)) for space in spaces]
    assert costs[0] > costs[1] > costs[2]


@pytest.mark.parametrize("axis", PartsLayout.axes)
def test_the_cost_grows_on_every_axis(axis):
    cost = PartsLayout(2, 4).cost(ModelWork(10.0, 2.0, 1.0))
    bucket = dict.fromkeys(PartsLayout.axes, 5)
    assert cost({**bucket, axis: 6}) > cost(bucket)


def test_the_budget_is_used_up_but_for_one_graph():
    for graphs in range(6, 42):
        assert graphs - len(LAYOUT.ladder(StepLimits(256, 64, 8192, 90000), graphs)) in (0, 1)


def test_a_budget_of_two_graphs_has_one_for_decodes_of_all_requests():
    space = LAYOUT.ladder(StepLimits(256, 32, 256, 2048), 2)
    decodes = space.pick(tokens=32, shared=256, unique=2048, logits=32)
    assert decodes["tokens"] == 32 and space.largest["tokens"] == 256


def test_however_many_graphs_prefills_are_no_finer_than_a_2048th_of_the_longest_context():
    space = LAYOUT.ladder(StepLimits(256, 64, 8192, 90000), 1000)
    assert min(bucket["shared"] for bucket in space) == 8192 // 2048
