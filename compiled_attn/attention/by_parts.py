"""Unified attention in three parts, which are merged: plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from compiled_attn.attention.call import UnifiedCall
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
from compiled_attn.ops import AttentionTraits, choose

__all__ = ["DENSE_KERNELS", "attend_parts"]


class DenseKernel:
    """`compiled_attn.attention.dense.attend` as a kernel, which supports everything."""

    name = "reference"
    attend = staticmethod(attend)

    def supports(self, traits: AttentionTraits) -> str | None:
        """See `compiled_attn.ops.Implementation`."""
        return None

    def unavailable(self, traits: AttentionTraits) -> str | None:
        """See `compiled_attn.ops.Implementation`."""
        return None


DENSE_KERNELS: tuple[SdpaKernel | DenseKernel, ...] = (SdpaKernel(), DenseKernel())
"""The kernels of the causal and shared parts, fastest first."""


def attend_parts(call: UnifiedCall, attend: Attend | None) -> tuple[Tensor, Tensor]:
    """Out ``[T, H, Dv]`` and lse ``[T, H]``, in float32, of a call whose tokens are written first.

    ``attend``: the kernel of the causal and shared parts; None: the fastest that can.
    """
    attend = choose(call.traits(), DENSE_KERNELS).attend if attend is None else attend
    if has_no_queries(call.query):
        nothing = of_no_queries(call.query, call.values[0])
        return merge(nothing), lse(nothing).float()
    key, value = call.write()
    scoring = call.scoring
    m = replace(call.metadata, shared_blocks=None, shared_bias=None)
    m = m.with_positions(window=scoring.window, alibi_slopes=scoring.slopes_for(call.query))
    causal = partial_attn_causal(
        call.query, key, value, m.causal_bias, m.causal_width, m.fmin,
        scale=scoring.scale, softcap=scoring.softcap, attend=attend,
    )  # fmt: skip
    found = causal, _shared(call, attend), _unique(call, m)
    parts = [part for part in found if part is not None]
    if parts and (sink := partial_attn_sinks(scoring.sinks, parts[0])) is not None:
        parts.append(sink)
    return merge(*parts, feps=call.metadata.feps), lse(*parts).float()


def _shared(call: UnifiedCall, attend: Attend) -> PartialAttention | None:
    """The shared blocks, chunk by chunk."""
    value_cache, value_scale = call.values
    scoring = call.scoring
    slopes = scoring.slopes_for(call.query)
    shared: PartialAttention | None = None
    for chunk in call.metadata.chunks_of_shared():
        s = chunk.with_positions(window=scoring.window, alibi_slopes=slopes)
        part = partial_attn_shared(
            call.query, call.key_cache, value_cache, s.shared_blocks, s.shared_bias,
            s.block_size, s.fmin, scale=scoring.scale, softcap=scoring.softcap,
            key_scale=call.key_scale, value_scale=value_scale, lengths=s.shared_lengths,
            attend=attend,
        )  # fmt: skip
        shared = part if shared is None or part is None else merge_online(shared, part)
    return shared


def _unique(call: UnifiedCall, m: UnifiedMetadata) -> PartialAttention | None:
    value_cache, value_scale = call.values
    scoring = call.scoring
    return partial_attn_unique(
        call.query, call.key_cache, value_cache, m.unique_blocks, m.unique_block_mapping,
        m.unique_bias, m.block_size, m.fmin, scale=scoring.scale, softcap=scoring.softcap,
        key_scale=call.key_scale, value_scale=value_scale, queries_used=m.unique_queries,
    )  # fmt: skip
