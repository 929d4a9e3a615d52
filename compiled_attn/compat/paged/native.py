"""Paged attention by the native kernel: every sequence is a request of one query."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.compat.paged.call import PagedCall
from compiled_attn.compat.paged.layouts import convert_key, convert_value
from compiled_attn.compat.paged.quant import Scale, element_type, per_head, stored
from compiled_attn.ops import PagedRequest, as_int32, cache_lacks

__all__ = ["attend_native", "request_of"]


def request_of(call: PagedCall, other: str = "") -> PagedRequest:
    """The properties of a call that decide whether the native kernel serves it.

    Args:
        call: checked.
        other: what else is asked for that the kernel does not have.
    """
    if call.layout == "packed":
        other = other or "reads caches of layout flat, NHD or HND, not packed"
    other = other or cache_lacks(call.key_cache, call.value_cache)
    cache_dtype = element_type(call.kv_cache_dtype, call.query.dtype)
    return PagedRequest(call.query.device.type, call.query.dtype, cache_dtype, other)


def attend_native(call: PagedCall) -> Tensor:
    """Attention ``[S, H, D]`` in the query's dtype of a call that the kernel supports."""
    query, size = call.query, call.block_size
    keys = convert_key(call.key_cache, call.layout, "NHD", block_size=size)
    values = convert_value(call.value_cache, call.layout, "NHD", block_size=size)
    keys, values = (stored(cache, call.kv_cache_dtype) for cache in (keys, values))
    table, slopes = as_int32(call.block_tables), call.alibi_slopes
    # The op knows the width of the table, but not `max_seq_len`.
    lengths = torch.where(call.seq_lens > call.capacity, -1, call.seq_lens)
    out, _ = torch.ops.compiled_attn.paged_attention(
        query if query.stride(-1) == 1 else query.contiguous(),
        keys,
        values,
        table if table.stride(-1) == 1 else table.contiguous(),
        as_int32(lengths).contiguous(),
        torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device),
        float(call.scale),
        alibi_slopes=None if slopes is None else slopes.float().contiguous(),
        key_scale=_scales(call, call.k_scale, keys),
        value_scale=_scales(call, call.v_scale, values),
    )
    result: Tensor = out
    return result


def _scales(call: PagedCall, scale: Scale, cache: Tensor) -> Tensor | None:
    """One scale a head for all tokens: a view of it as the kernel reads scales."""
    if call.kv_cache_dtype == "auto":
        return None
    return per_head(scale, cache.device).expand(cache.shape[:3])
