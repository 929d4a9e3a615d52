"""Unified attention in three parts, which are merged: plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from compiled_attn.attention.dense import attend
from compiled_attn.attention.merge import lse, merge, merge_online
from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.parts import (
    partial_attn_causal,
    partial_attn_shared,
    partial_attn_sinks,
    partial_attn_unique,
)
from compiled_attn.attention.sdpa import SdpaKernel
from compiled_attn.attention.state import Attend, PartialAttention, has_no_queries, of_no_queries
from compiled_attn.ops import AttentionTraits, Implementation, PagedCall, choose

__all__ = ["DENSE_KERNELS", "attend_parts", "fastest"]


class DenseKernel(Implementation):
    """`compiled_attn.attention.dense.attend` as a kernel, which supports everything."""

    name = "reference"
    attend = staticmethod(attend)


DENSE_KERNELS: tuple[SdpaKernel | DenseKernel, ...] = (SdpaKernel(), DenseKernel())
"""The kernels of the causal and shared parts, fastest first."""


def fastest(traits: AttentionTraits) -> Attend:
    """Returns the fastest kernel of the causal and shared parts that supports a call."""
    return choose(traits, DENSE_KERNELS).attend


def attend_parts(
    call: PagedCall, key: Tensor, value: Tensor, metadata: UnifiedMetadata, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Returns out ``[T, H, Dv]`` and lse ``[T, H]``, in float32; the caches hold the new tokens.

    Args:
        call: its caches, scales and scoring.
        key, value: the new tokens as the caches store them.
        metadata: the parts.
        attend: the kernel of the causal and shared parts.
    """
    query, scoring = call.query, call.scoring
    if has_no_queries(query):
        nothing = of_no_queries(query, value)
        return merge(nothing), lse(nothing).float()
    positions: dict[str, Any] = {
        "window": scoring.window, "alibi_slopes": scoring.slopes_for(query)
    }  # fmt: skip
    options: dict[str, Any] = {"scale": scoring.scale, "softcap": scoring.softcap}
    slots = call.key_cache.flatten(0, 1), call.value_cache.flatten(0, 1)
    scales = {"key_scale": call.key_scale, "value_scale": call.value_scale}
    of_caches = options | {
        name: None if each is None else each.flatten(0, 1) for name, each in scales.items()
    }
    m = replace(metadata, shared_blocks=None, shared_bias=None).with_positions(**positions)
    causal = partial_attn_causal(
        query, key, value, m.causal_bias, m.causal_width, m.fmin, attend=attend, **options
    )
    shared: PartialAttention | None = None
    for chunk in metadata.chunks_of_shared():
        s = chunk.with_positions(**positions)
        part = partial_attn_shared(
            query, *slots, s.shared_blocks, s.shared_bias, s.block_size, s.fmin,
            lengths=s.shared_lengths, attend=attend, **of_caches,
        )  # fmt: skip
        shared = part if shared is None or part is None else merge_online(shared, part)
    unique = partial_attn_unique(
        query, *slots, m.unique_blocks, m.unique_block_mapping, m.unique_bias, m.block_size,
        m.fmin, queries_used=m.unique_queries, **of_caches,
    )  # fmt: skip
    parts = [part for part in (causal, shared, unique) if part is not None]
    if parts and (sink := partial_attn_sinks(scoring.sinks, parts[0])) is not None:
        parts.append(sink)
    return merge(*parts, feps=metadata.feps), lse(*parts).float()
