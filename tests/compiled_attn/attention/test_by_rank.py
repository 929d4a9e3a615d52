"""Attention over keys of several ranks; here of one, by itself (`tests.compiled_attn.ranks`)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from compiled_attn import unified_attention
from compiled_attn.attention.by_rank import gathered
from compiled_attn.attention.merge import lse as log_sum_exp
from compiled_attn.attention.merge import merge
from compiled_attn.attention.metadata import KeyRanks
from compiled_attn.step import BatchBuilder, BlockShare, DividedTableLayout, Request, TableLayout

REQUESTS = [Request([1] * 3, 6, [5, 2, 3]), Request([1], 0, [1]), Request([1], 4, [4, 6])]
TOKENS = 5


@pytest.fixture
def ranks():
    """One rank, alone in its group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield KeyRanks(dist.group.WORLD.group_name, 1)
    finally:
        dist.destroy_process_group()


def attended(layout, **scoring):
    torch.manual_seed(0)
    caches = torch.randn(2, 8 * 4, 2, 16)
    query, key, value = torch.randn(TOKENS, 4, 16), *torch.randn(2, TOKENS, 2, 16)
    batch = layout.plan(BatchBuilder(8, 4).rows_of(REQUESTS)).fill()
    return unified_attention(
        query, key, value, *caches, 0.3, layout.metadata(batch, 4), return_lse=True, **scoring
    )


@pytest.mark.parametrize(
    "scoring", [{}, {"softcap": 1.5}, {"sinks": torch.tensor([0.5, -3, 9, 0])}]
)
def test_a_rank_that_has_all_keys_finds_what_one_process_does(ranks, scoring):
    layout = DividedTableLayout(8, 4, None, BlockShare(0, 1), ranks.group)
    for own, expected in zip(
        attended(layout, **scoring), attended(TableLayout(8, 4), **scoring), strict=True
    ):
        torch.testing.assert_close(own, expected)


def test_a_row_without_a_key_is_zero_and_one_that_is_not_finite_stays_so(ranks):
    out, lse = torch.zeros(3, 2, 4), torch.full((3, 2), -torch.inf)
    out[1], lse[1] = 2.0, 5.0
    out[2], lse[2] = torch.nan, torch.nan
    parts = gathered(out, lse, ranks)
    assert torch.equal(merge(*parts)[:2], out[:2]) and torch.equal(log_sum_exp(*parts)[:2], lse[:2])
    assert merge(*parts)[2].isnan().all()


@pytest.mark.parametrize("scoring", [{"sliding_window": 3}, {"alibi_slopes": torch.ones(4)}])
def test_what_depends_on_positions_is_refused(scoring):
    layout = DividedTableLayout(8, 4, None, BlockShare(0, 2), "none")
    with pytest.raises(ValueError, match="positions needs all keys on one rank"):
        attended(layout, **scoring)


def test_a_step_in_parts_is_refused():
    layout = DividedTableLayout(8, 4, None, BlockShare(0, 2), "none")
    batch = layout.plan(BatchBuilder(8, 4).rows_of(REQUESTS)).fill()
    metadata = dataclasses.replace(
        layout.metadata(batch, 4), block_tables=None, seq_lens=None, query_start_loc=None,
        causal_bias=torch.zeros(TOKENS, TOKENS),
    )  # fmt: skip
    tensors = torch.zeros(TOKENS, 4, 16), *torch.zeros(2, TOKENS, 2, 16)
    with pytest.raises(ValueError, match="ranks with a step request by request"):
        unified_attention(*tensors, *torch.zeros(2, 32, 2, 16), 1.0, metadata)
