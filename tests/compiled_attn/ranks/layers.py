"""One layer whose keys lie on several ranks, and dense attention in float64 to compare with."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from compiled_attn import unified_attention
from compiled_attn.ranks import Ranks
from compiled_attn.step import BatchBuilder, BlockShare, DividedTableLayout, Request

BLOCK, HEADS, KV_HEADS, DIM, SCALE = 4, 4, 2, 16, 0.3
# Tokens before a step, and in it: prompts, chunks, decodes, some of which end inside a block.
STEPS = [[(0, 5), (9, 3), (7, 1), (0, 1)], [(16, 1), (3, 1)], [(21, 8)], [(1, 2), (4, 4), (8, 1)]]


def farthest(ranks: Ranks, seed: int) -> float:
    """The maximum difference of out and lse of a layer with a softcap, sinks, or neither."""
    torch.manual_seed(seed)
    step = STEPS[seed % len(STEPS)]
    softcap = 2.0 if seed % 3 == 1 else None
    sinks = torch.randn(HEADS) if seed % 3 == 2 else None
    lengths = [before + new for before, new in step]
    keys = [torch.randn(2, length, KV_HEADS, DIM) for length in lengths]
    query = torch.randn(sum(new for _, new in step), HEADS, DIM)
    share = BlockShare(ranks.rank, ranks.count)
    num_blocks = share.of_all(8)
    tables = _tables(lengths, num_blocks, one_rank=seed % 2 == 1 and ranks.count)
    cache = torch.full((2, 8 * BLOCK, KV_HEADS, DIM), math.nan)  # what is not written is not read
    for each, table, (before, _) in zip(keys, tables, step, strict=True):
        for at in range(before):
            block = np.array(table[at // BLOCK])
            if share.has(block):
                cache[:, int(share.local(block)) * BLOCK + at % BLOCK] = each[:, at]
    new = torch.cat([each[:, before:] for each, (before, _) in zip(keys, step, strict=True)], 1)
    requests = [
        Request([0] * count, before, table)
        for table, (before, count) in zip(tables, step, strict=True)
    ]
    layout = DividedTableLayout(num_blocks, BLOCK, None, share, ranks.group)
    plan = layout.plan(BatchBuilder(num_blocks, BLOCK).rows_of(requests))
    batch = plan.fill({"tokens": len(query) + 3, "requests": len(step) + 2})
    padding = torch.full((3, KV_HEADS, DIM), 7.0)
    out, lse = unified_attention(
        torch.cat([query, torch.zeros(3, HEADS, DIM)]),
        torch.cat([new[0], padding]),
        torch.cat([new[1], padding]),
        *cache,
        SCALE,
        layout.metadata(batch, BLOCK),
        softcap=softcap,
        sinks=sinks,
        return_lse=True,
    )
    expected = [
        _dense(rows, *each, softcap, sinks)
        for rows, each in zip(query.split([new for _, new in step]), keys, strict=True)
    ]
    found = out[: len(query)], lse[: len(query)]
    return max(
        float((a.double() - torch.cat(b)).abs().max())
        for a, b in zip(found, zip(*expected, strict=True), strict=True)
    )


def _tables(lengths: list[int], num_blocks: int, one_rank: int) -> list[list[int]]:
    """Random blocks for each request; of one rank alone if ``one_rank`` is the number of ranks."""
    order = [int(each) + 1 for each in torch.randperm(num_blocks - 1)]
    if one_rank:
        order.sort(key=lambda block: (block - 1) % one_rank)
    starts = iter(order)
    return [[next(starts) for _ in range(-(-length // BLOCK))] for length in lengths]


def _dense(
    query: Tensor, key: Tensor, value: Tensor, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Out ``[n, H, D]`` and lse ``[n, H]`` of the last n tokens of a request, in float64."""
    groups = HEADS // KV_HEADS
    key, value = (each.double().repeat_interleave(groups, 1) for each in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query.double(), key) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(len(key) - len(query), len(key))
    scores = scores.masked_fill(torch.arange(len(key)) > own.unsqueeze(1), -math.inf)
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores, value = torch.cat([scores, extra], -1), torch.cat([value, 0 * value[:1]])
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value)
    return out, scores.logsumexp(-1).T
