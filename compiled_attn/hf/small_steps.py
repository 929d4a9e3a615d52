"""Steps of a model over a small cache of their own, outside of any engine and graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.step import BatchBuilder, Request

if TYPE_CHECKING:
    from compiled_attn.hf.model import PagedCausalLM

__all__ = ["small_cache", "step_logits"]


def small_cache(
    cache: PagedKVCache, num_blocks: int, block_size: int, dtype: torch.dtype
) -> PagedKVCache:
    """A cache of the same layers, in other sizes and another dtype."""
    return PagedKVCache(
        cache.num_layers,
        num_blocks,
        block_size,
        cache.num_kv_heads,
        cache.head_dim,
        dtype=dtype,
        device=cache.key(0).device,
        shapes=cache.shapes,
    )


def step_logits(paged: PagedCausalLM, cache: PagedKVCache, requests: Sequence[Request]) -> Tensor:
    """Logits ``[L, vocab]`` of one step of requests, in the form of the model's steps."""
    width = max(len(request.block_table) for request in requests)
    form = paged.form.over(cache.num_blocks, cache.block_size, width)
    plan = form.plan(BatchBuilder(cache.num_blocks, cache.block_size).rows_of(requests))
    step: Any = plan.fill()
    device = cache.key(0).device
    moved = type(step)(*(None if field is None else field.to(device) for field in step))
    with torch.no_grad():
        return paged.compute(moved, cache)
