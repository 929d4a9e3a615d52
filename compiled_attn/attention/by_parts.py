"""Unified attention in three parts, which are merged: plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from compiled_attn.attention.call import UnifiedCall
from compiled_attn.attention.merge import lse, merge, merge_online
from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.parts import (
    partial_attn_causal,
    partial_attn_shared,
    partial_attn_sinks,
    partial_attn_unique,
)
from compiled_attn.attention.state import Attend, PartialAttention
from compiled_attn.cache.writes import write_step

__all__ = ["attend_parts"]


def attend_parts(call: UnifiedCall, attend: Attend) -> tuple[Tensor, Tensor]:
    """Out ``[T, H, Dv]`` and lse ``[T, H]``, in float32, of a call whose tokens are written first.

    Raises:
        ValueError: the metadata has no parts. Nothing is written.
    """
    if not call.metadata.has_parts:
        raise ValueError(
            "expected metadata with parts for the portable kernel, got it by request alone: "
            "use StepBatch.metadata, or the native kernel (which has no gradients: take no_grad)"
        )
    key, value = write_step(call)
    m = replace(call.metadata, shared_blocks=None, shared_bias=None)
    m = m.seen_from(window=call.sliding_window, alibi_slopes=call.alibi_slopes)
    causal = partial_attn_causal(
        call.query, key, value, m.causal_bias, m.causal_width, m.fmin,
        scale=call.scale, softcap=call.softcap, attend=attend,
    )  # fmt: skip
    found = causal, _shared(call, attend), _unique(call, m)
    parts = [part for part in found if part is not None]
    if parts and (sink := partial_attn_sinks(call.sinks, parts[0])) is not None:
        parts.append(sink)
    return merge(*parts, feps=call.metadata.feps), lse(*parts).float()


def _shared(call: UnifiedCall, attend: Attend) -> PartialAttention | None:
    """The shared blocks, chunk by chunk."""
    value_cache, value_scale = call.values
    shared: PartialAttention | None = None
    for chunk in call.metadata.chunks_of_shared():
        s = chunk.seen_from(window=call.sliding_window, alibi_slopes=call.alibi_slopes)
        part = partial_attn_shared(
            call.query, call.key_cache, value_cache, s.shared_blocks, s.shared_bias,
            s.block_size, s.fmin, scale=call.scale, softcap=call.softcap,
            key_scale=call.key_scale, value_scale=value_scale, lengths=s.shared_lengths,
            attend=attend,
        )  # fmt: skip
        shared = part if shared is None or part is None else merge_online(shared, part)
    return shared


def _unique(call: UnifiedCall, m: UnifiedMetadata) -> PartialAttention | None:
    value_cache, value_scale = call.values
    return partial_attn_unique(
        call.query, call.key_cache, value_cache, m.unique_blocks, m.unique_block_mapping,
        m.unique_bias, m.block_size, m.fmin, scale=call.scale, softcap=call.softcap,
        key_scale=call.key_scale, value_scale=value_scale, queries_used=m.unique_queries,
    )  # fmt: skip
