"""Alternatives to the native kernel: each takes a `Step` of decodes of one length."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_attn.attention.merge import merge
from compiled_attn.attention.parts import partial_attn_unique
from compiled_attn.ops import load
from native.scene import DIM, HEADS, KV_HEADS, Step

GROUP = HEADS // KV_HEADS


def native(step: Step) -> Tensor:
    """The op."""
    return load(strict=True).paged_attention(*step.arguments, **step.scales)[0]


def gather_sdpa(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    """Gathers each request's blocks, heads folded into query rows: the best eager variant."""
    requests = table.shape[0]
    blocks = table.flatten().long()
    key, value = (
        cache[blocks].view(requests, -1, KV_HEADS, DIM).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    folded = query.view(requests, KV_HEADS, GROUP, DIM)
    return F.scaled_dot_product_attention(folded, key, value).reshape(query.shape)


def unified_unique(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    """The unique part of unified attention: the best variant in pure torch."""
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
    """SDPA on contiguous keys and values, without paging: ``[R, Hk, N, D]``."""
    folded = query.view(query.shape[0], KV_HEADS, GROUP, DIM)
    return F.scaled_dot_product_attention(folded, key, value).reshape(query.shape)


def causal_sdpa(step: Step) -> Callable[[object], Tensor]:
    """SDPA of a prompt or, with a mask, its last tokens; keys in a row. Any argument is ignored."""
    queries, length = len(step.query), int(step.seq_lens[0])
    query = step.query.transpose(0, 1).unsqueeze(0)
    key, value = (torch.randn(1, KV_HEADS, length, DIM).to(query.dtype) for _ in range(2))
    seen: Tensor | None = None
    if length > queries:
        seen = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)

    def run(_: object) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, enable_gqa=True
        )

    return run


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function under inductor, for fixed shapes."""
    return torch.compile(function, fullgraph=True, dynamic=False)
