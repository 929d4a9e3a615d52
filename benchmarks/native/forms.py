"""Alternatives to the native kernel: each takes a `Step` of decodes of one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_attn.kernels.native import load
from compiled_attn.partial import merge, partial_attn_unique
from native.scene import DIM, HEADS, KV_HEADS, Step

GROUP = HEADS // KV_HEADS


def native(step: Step) -> Tensor:
    """The op."""
    return load(strict=True).paged_attention(*step.arguments, **step.scales)[0]


def gather_sdpa(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    """Gathers each request's blocks, heads folded into query rows: the best eager form."""
    requests = table.shape[0]
    blocks = table.flatten().long()
    key, value = (
        cache[blocks].view(requests, -1, KV_HEADS, DIM).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    folded = query.view(requests, KV_HEADS, GROUP, DIM)
    return F.scaled_dot_product_attention(folded, key, value).reshape(query.shape)


def unified_unique(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    """The unique part of unified attention: the best form in pure torch."""
    requests, width = table.shape
    block_size = key_cache.shape[1]
    rows = torch.arange(requests).repeat_interleave(width)
    bias = query.new_zeros(requests * width, block_size)
    part = partial_attn_unique(
        query, key_cache.flatten(0, 1), value_cache.flatten(0, 1), table.flatten().long(), rows,
        bias, block_size, scale=DIM**-0.5,
    )  # fmt: skip
    assert part is not None
    return merge(part).to(query.dtype)


def contiguous_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA on keys and values that lie in a row, no paging: ``[R, Hk, N, D]``."""
    folded = query.view(query.shape[0], KV_HEADS, GROUP, DIM)
    return F.scaled_dot_product_attention(folded, key, value).reshape(query.shape)


class FlexPaged:
    """FlexAttention over the pool, with a block mask of each request's own blocks.

    The pool has to be one sequence of keys, so the block mask is as wide as the pool.
    """

    def __init__(self, step: Step) -> None:
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        requests, width = step.block_table.shape
        block_size = step.key_cache.shape[1]
        pool = step.key_cache.shape[0]
        indices = torch.zeros(requests, 1, 1, pool, dtype=torch.int32)
        indices[:, 0, 0, :width] = step.block_table
        counts = torch.full((requests, 1, 1), width, dtype=torch.int32)
        self.mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(1, block_size))
        self.run = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def __call__(self, step: Step) -> Tensor:
        """Attention of the step."""
        key, value = (
            cache.flatten(0, 1).transpose(0, 1).unsqueeze(0).expand(len(step.query), -1, -1, -1)
            for cache in (step.key_cache, step.value_cache)
        )
        out: Any = self.run(
            step.query.unsqueeze(2), key, value, block_mask=self.mask, enable_gqa=True
        )
        return out.squeeze(2)


def compiled(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A form under inductor, for fixed shapes."""
    return torch.compile(form, fullgraph=True, dynamic=False)
