"""Decode with FlexAttention straight from the pool: the block mask of a step is its block table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention, noop_mask

from native.scene import Step

_QUERY_BLOCK = 128


def flex(steps: Sequence[Step]) -> Callable[[Step], Tensor]:
    """FlexAttention under inductor for decodes of one length, a multiple of the block size.

    Makes their masks first, as an engine does once a step for all layers. Declares all blocks
    full: for partial ones alone, torch 2.13 generates C++ that does not compile.
    """
    masks = {id(step): block_mask(step.block_table, step.key_cache) for step in steps}
    attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def run(step: Step) -> Tensor:
        # Views are made outside of the graph: the template reads sizes of their base.
        key, value = (heads_first(c, len(step.query)) for c in (step.key_cache, step.value_cache))
        query = step.query.unsqueeze(2)
        return attend(query, key, value, block_mask=masks[id(step)], enable_gqa=True).squeeze(2)

    return run


def heads_first(cache: Tensor, requests: int) -> Tensor:
    """All slots of the pool as one sequence, the same for each request: ``[R, Hk, slots, D]``."""
    return cache.flatten(0, 1).transpose(0, 1).unsqueeze(0).expand(requests, -1, -1, -1)


def block_mask(table: Tensor, cache: Tensor) -> BlockMask:
    """Each request sees the blocks of its row of the table, whole."""
    blocks, block_size = cache.shape[:2]
    requests, width = table.shape
    indices = torch.zeros(requests, 1, 1, blocks, dtype=torch.int32)
    indices[..., :width] = table[:, None, None]
    count = torch.full((requests, 1, 1), width, dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        torch.zeros_like(count), torch.zeros_like(indices), count, indices,
        BLOCK_SIZE=(_QUERY_BLOCK, block_size), mask_mod=noop_mask,
        seq_lengths=(1, blocks * block_size),
    )  # fmt: skip
