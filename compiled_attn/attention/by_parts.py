"""Unified attention in three parts, which are merged: plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

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
    m = replace(metadata, shared_blocks=None, shared_bias=None)
    m = m.with_positions(window=scoring.window, alibi_slopes=scoring.slopes_for(query))
    causal = partial_attn_causal(
        query, key, value, m.causal_bias, m.causal_width, m.fmin,
        scale=scoring.scale, softcap=scoring.softcap, attend=attend,
    )  # fmt: skip
    found = causal, _shared(call, metadata, attend), _unique(call, m)
    parts = [part for part in found if part is not None]
    if parts and (sink := partial_attn_sinks(scoring.sinks, parts[0])) is not None:
        parts.append(sink)
    return merge(*parts, feps=metadata.feps), lse(*parts).float()


def _slots(call: PagedCall) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    key_scale, value_scale = (
        None if each is None else each.flatten(0, 1) for each in (call.key_scale, call.value_scale)
    )
    return call.key_cache.flatten(0, 1), call.value_cache.flatten(0, 1), key_scale, value_scale


def _shared(call: PagedCall, metadata: UnifiedMetadata, attend: Attend) -> PartialAttention | None:
    key_cache, value_cache, key_scale, value_scale = _slots(call)
    scoring = call.scoring
    slopes = scoring.slopes_for(call.query)
    shared: PartialAttention | None = None
    for chunk in metadata.chunks_of_shared():
        s = chunk.with_positions(window=scoring.window, alibi_slopes=slopes)
        part = partial_attn_shared(
            call.query, key_cache, value_cache, s.shared_blocks, s.shared_bias,
            s.block_size, s.fmin, scale=scoring.scale, softcap=scoring.softcap,
            key_scale=key_scale, value_scale=value_scale, lengths=s.shared_lengths,
            attend=attend,
        )  # fmt: skip
        shared = part if shared is None or part is None else merge_online(shared, part)
    return shared


def _unique(call: PagedCall, m: UnifiedMetadata) -> PartialAttention | None:
    key_cache, value_cache, key_scale, value_scale = _slots(call)
    scoring = call.scoring
    return partial_attn_unique(
        call.query, key_cache, value_cache, m.unique_blocks, m.unique_block_mapping,
        m.unique_bias, m.block_size, m.fmin, scale=scoring.scale, softcap=scoring.softcap,
        key_scale=key_scale, value_scale=value_scale, queries_used=m.unique_queries,
    )  # fmt: skip
