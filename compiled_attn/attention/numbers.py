"""Checks of the numbers in the index tensors of a step, read before anything is written.

A compiled or captured graph must not read them: there `BatchBuilder` has checked them on the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_attn.arguments import slot_used_twice
from compiled_attn.attention.metadata import UnifiedMetadata

__all__ = ["check_numbers"]


def check_numbers(m: UnifiedMetadata, tokens: int, slots: int) -> None:
    """Raises ValueError unless every slot, block and row is one, and new tokens have their own.

    Args:
        m: metadata whose shapes and dtypes fit already.
        tokens: rows of the step.
        slots: slots of the cache.
    """
    blocks = slots // m.block_size
    _expect_range("slot_mapping", m.slot_mapping, slots)
    if m.shared_blocks is not None:
        _expect_range("shared_blocks", m.shared_blocks, blocks)
    if isinstance(m.unique_blocks, Tensor):
        _expect_range("unique_blocks", m.unique_blocks, blocks)
    elif m.unique_blocks is not None and not 0 <= m.unique_blocks <= blocks:
        raise ValueError(
            f"unique_blocks: expected at most the {blocks} blocks of the cache, "
            f"got {m.unique_blocks}: the metadata was built for another cache"
        )
    if m.unique_block_mapping is not None:
        _expect_range("unique_block_mapping", m.unique_block_mapping, tokens)
    _check_queries(m)
    _check_overlap(m)


def _check_queries(m: UnifiedMetadata) -> None:
    mapping, bias = m.unique_block_mapping, m.unique_bias
    if m.unique_queries is None or mapping is None or bias is None:
        return
    reading = mapping[(bias > -math.inf).flatten(1).any(1)]
    listed = m.unique_queries[m.unique_queries >= 0]
    if not torch.isin(reading, listed).all() or listed.unique().numel() != listed.numel():
        raise ValueError(
            "unique_queries: expected every row of unique_block_mapping in it once, got "
            f"{m.unique_queries.tolist()}: a row that is left out would lose its blocks, one that "
            "is listed twice would count them twice"
        )


def _check_overlap(m: UnifiedMetadata) -> None:
    # The null block is where padding writes, all of it to the same slots.
    slot = slot_used_twice(m.slot_mapping[m.slot_mapping >= m.block_size])
    if slot is not None:
        raise ValueError(
            f"slot_mapping: expected a slot of its own for every new token, got slot {slot} twice: "
            "requests that share a block must copy it before they write to it"
        )


def _expect_range(name: str, ids: Tensor, limit: int) -> None:
    if not ids.numel():
        return
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0 or high >= limit:
        raise ValueError(
            f"{name}: expected numbers in 0..{limit - 1}, got {low}..{high}: "
            "check the block tables; padding points at 0"
        )
