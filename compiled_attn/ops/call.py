"""One call of the op ``paged_attention``, and the way to it that unified, flash and paged share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_attn.attention.scoring import Scoring

__all__ = ["NewTokens", "PagedCall", "as_int32", "attend_paged"]

_INT32 = torch.iinfo(torch.int32)


class NewTokens(NamedTuple):
    """What a call writes to the caches before it attends.

    Shape:
        - key: ``[T, Hk, D]`` in the query's dtype
        - value: ``[T, Hk, Dv]`` in the query's dtype
        - slot_mapping: ``[T]`` ints, slot ``block * block_size + offset`` of each token; padding
          points into null block 0
    """

    key: Tensor
    value: Tensor
    slot_mapping: Tensor


class PagedCall(NamedTuple):
    """The arguments of `compiled_attn.ops.reference.paged_attention`, under the same names.

    ``new``: tokens that are written first; None: the caches are only read.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scoring: Scoring
    causal: bool = True
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    new: NewTokens | None = None

    @classmethod
    def of(
        cls,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        *,
        causal: bool = True,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        new: NewTokens | None = None,
        **scoring: Any,
    ) -> PagedCall:
        """The call with the arguments of the op; ``scoring``: those of `Scoring` beside a scale."""
        return cls(
            query, key_cache, value_cache, block_table, seq_lens, query_start_loc,
            Scoring(scale, **scoring), causal, key_scale, value_scale, new,
        )  # fmt: skip


def attend_paged(call: PagedCall) -> tuple[Tensor, Tensor]:
    """Out ``[T, H, Dv]`` and lse ``[T, H]`` of the op, for integers and strides of any kind.

    The caches must have a last stride of 1: the op writes them where they are.
    """
    scale, window, softcap, slopes, sinks = call.scoring
    ints = call.block_table, call.seq_lens, call.query_start_loc
    step = [_dense_rows(as_int32(each)) for each in ints]
    options = {
        "causal": call.causal,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": None if slopes is None else slopes.float().contiguous(),
        "sinks": None if sinks is None else sinks.float().contiguous(),
        "key_scale": call.key_scale,
        "value_scale": call.value_scale,
    }
    query, caches = _dense_rows(call.query), (call.key_cache, call.value_cache)
    if call.new is None:
        out, lse = torch.ops.compiled_attn.paged_attention(query, *caches, *step, scale, **options)
        return out, lse
    key, value, slots = call.new
    out, lse = torch.ops.compiled_attn.paged_attention_(
        query, _dense_rows(key), _dense_rows(value), *caches, slots.long().contiguous(), *step,
        scale, **options,
    )  # fmt: skip
    return out, lse


def as_int32(ints: Tensor) -> Tensor:
    """Block ids, lengths or offsets in int32; -1, which the op refuses, is what does not fit."""
    if ints.dtype == torch.int32:
        return ints
    if ints.dtype == torch.int64:
        ints = torch.where((ints >= _INT32.min) & (ints <= _INT32.max), ints, -1)
    return ints.int()


def _dense_rows(tensor: Tensor) -> Tensor:
    """The op walks along the last axis, and takes any other strides; vectors are dense."""
    return tensor if tensor.dim() > 1 and tensor.stride(-1) == 1 else tensor.contiguous()
