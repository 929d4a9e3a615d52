"""One call of paged attention: its arguments, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.compat.paged.layouts import Layout
from compiled_attn.compat.paged.scales import Scale, element_type
from compiled_attn.ops import AttentionTraits, unit_strides

__all__ = ["CacheWrite", "DecodeCall"]


@dataclass(frozen=True)
class DecodeCall:
    """What `paged_attention_v1` and `_v2` and `PagedAttention` have in common; see the first."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    num_kv_heads: int
    scale: float
    block_tables: Tensor
    seq_lens: Tensor
    block_size: int
    max_seq_len: int
    alibi_slopes: Tensor | None
    kv_cache_dtype: str
    k_scale: Scale
    v_scale: Scale
    layout: Layout

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.key_cache.shape[0] // (self.block_size if self.layout == "flat" else 1)

    @property
    def capacity(self) -> int:
        """Tokens that a row can have: what its table row and ``max_seq_len`` leave room for."""
        return min(self.block_tables.shape[1] * self.block_size, self.max_seq_len)

    @property
    def dtype(self) -> torch.dtype:
        """Of scores, weights and sums."""
        return torch.promote_types(self.query.dtype, torch.float32)

    def traits(self, *, partitions: bool = False) -> AttentionTraits:
        """What decides who can serve the call."""
        query, caches = self.query, (self.key_cache, self.value_cache)
        cache_dtype = element_type(self.kv_cache_dtype, query.dtype)
        return AttentionTraits(
            query.device.type,
            query.dtype,
            (cache_dtype, cache_dtype),
            query.shape[-1],
            alibi=0 if self.alibi_slopes is None else 1,
            unit_stride=unit_strides(*caches),
            layout=self.layout,
            partitions=partitions,
        )


class CacheWrite(NamedTuple):
    """One call of `reshape_and_cache`, under the names of its arguments."""

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    kv_cache_dtype: str
    k_scale: Scale
    v_scale: Scale
    layout: Layout
