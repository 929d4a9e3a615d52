"""A call of `flash_attn_with_kvcache` for the native kernel: rows become requests of one length."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.compat.flash.call import FlashCall
from compiled_attn.compat.flash.layout import Layout
from compiled_attn.ops import PagedRequest, as_int32, cache_lacks

__all__ = ["attend_native", "request_of"]


def request_of(call: FlashCall) -> PagedRequest:
    """The properties of a call that decide whether the native kernel serves it."""
    return PagedRequest(call.q.device.type, call.q.dtype, call.k_cache.dtype, _other(call))


def attend_native(call: FlashCall, query: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Out ``[B, Sq, H, D]`` and log-sum-exp ``[B, H, Sq]``; the new tokens are in the cache.

    Args:
        call: checked, and supported by the kernel.
        query: ``[B, Sq, H, D]``, rotated.
        layout: where the rows lie. A contiguous cache is one of a single block a row; a row that is
            all left pad is padding.
    """
    batch, queries = query.shape[:2]
    table = layout.table
    if table is None:
        table = torch.arange(batch, device=query.device).unsqueeze(1)
    totals = layout.totals
    if layout.leftpad is not None:
        totals = torch.where(layout.leftpad >= totals, 0, totals)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * queries
    left, right = call.window
    rows = query.flatten(0, 1)
    out, lse = torch.ops.compiled_attn.paged_attention(
        rows if rows.stride(-1) == 1 else rows.contiguous(),
        call.k_cache,
        call.v_cache,
        as_int32(table).contiguous(),
        as_int32(totals).contiguous(),
        starts,
        call.scale,
        causal=right == 0,
        window=left + 1 if left >= 0 else None,
        softcap=call.softcap if call.softcap > 0 else None,
        alibi_slopes=None if call.alibi_slopes is None else call.alibi_slopes.contiguous(),
    )
    return out.unflatten(0, (batch, queries)), lse.unflatten(0, (batch, queries)).transpose(1, 2)


def _other(call: FlashCall) -> str:
    """What the call asks for that the kernel does not have; empty: nothing."""
    left, right = call.window
    slopes = call.alibi_slopes
    if call.cache_leftpad is not None:
        return "has no left pad"
    if right > 0 or (right < 0 <= left):
        return f"has no window of ({left}, {right}), only causal ones"
    if slopes is not None and slopes.dim() != 1:
        return "has ALiBi slopes for all rows alike, not for each row"
    if slopes is not None and right != 0:
        return "has ALiBi for causal attention only"
    return cache_lacks(call.k_cache, call.v_cache)
