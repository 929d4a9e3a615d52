"""Decode attention over pages: the portable form in partitions, and the native op."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from compiled_attn.attention.scoring import Scoring
from compiled_attn.attention.state import FEPS, FMIN, PartialAttention
from compiled_attn.compat.paged.block_tables import lost_rows, pages
from compiled_attn.compat.paged.inputs import DecodeCall, Scale, per_head, stored
from compiled_attn.compat.paged.layouts import convert_key, convert_value
from compiled_attn.compat.paged.products import scores, weighted
from compiled_attn.ops import PagedCall, attend_paged

__all__ = ["attend_natively", "attend_pages", "reduce_partitions"]

_GATHERED_AT_ONCE = 1 << 21
"""Elements of keys gathered at a time in eager mode, so that the allocator can reuse memory."""


def attend_pages(
    call: DecodeCall, lengths: list[int] | None, partition: int | None = None
) -> PartialAttention:
    """Attends to partitions of ``partition`` tokens (None: P = 1), by a validated call.

    Returns out ``[S, H, P, D]``, max and sum ``[S, H, P]``. ``lengths``: numbers in ``seq_lens``.
    """
    if lengths is not None:
        return _attend_known(call, lengths, partition)
    width = -(-call.capacity // call.block_size)
    empty = width == 0 or 0 in call.key_cache.shape
    parts = _empty_partitions(call, 1) if empty else _attend(call, width, partition)
    # A graph cannot raise for numbers in a tensor, but must not read other blocks either.
    lost = lost_rows(call)[:, None, None]
    return parts._replace(out=torch.where(lost.unsqueeze(-1), math.nan, parts.out))


def reduce_partitions(parts: PartialAttention) -> Tensor:
    """Merges partitions, ``[S, H, P, D] -> [S, H, D]``; rows without tokens are zeros."""
    row_max = parts.max.amax(-1, keepdim=True)
    factor = torch.exp(parts.max - row_max)
    total = (parts.sum * factor).sum(-1, keepdim=True)
    return (parts.out * factor.unsqueeze(-1)).sum(-2) / total.clamp_min(FEPS)


def _attend_known(call: DecodeCall, lengths: list[int], partition: int | None) -> PartialAttention:
    """Attends to a few rows at a time, each slice as wide as its longest row."""
    count = -(-max(lengths, default=0) // partition) if partition else 1
    parts = _empty_partitions(call, max(count, 1))
    for rows in _slices(lengths, _GATHERED_AT_ONCE // (call.num_kv_heads * call.query.shape[2])):
        longest = max(lengths[rows])
        if longest:
            names = "query", "block_tables", "seq_lens"
            few = replace(call, **{name: getattr(call, name)[rows] for name in names})
            found = _attend(few, -(-longest // call.block_size), partition)
            for whole, part in zip(parts, found, strict=True):
                whole[rows, :, : part.shape[2]] = part[:, :, :count]
    return parts


def _slices(lengths: list[int], limit: int) -> Iterator[slice]:
    """Slices of rows that have at most ``limit`` tokens when padded to their longest."""
    start, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > start and (row + 1 - start) * longest > limit:
            yield slice(start, row)
            start, longest = row, length
    if lengths:
        yield slice(start, len(lengths))


def _attend(call: DecodeCall, width: int, partition: int | None) -> PartialAttention:
    size, layout = call.block_size, call.layout
    blocks, positions, visible = pages(call, width, partition)
    query = call.query.unflatten(1, (call.num_kv_heads, -1)).to(call.dtype)  # [S, Hk, G, D]

    keys = stored(call.key_cache, call.kv_cache_dtype)
    values = stored(call.value_cache, call.kv_cache_dtype)

    raw = scores(query, keys, blocks, size, layout)  # [S, P, Hk, G, N]
    biased = raw * _score_scale(call)
    if call.alibi_slopes is not None:
        biased = biased + _alibi(call, positions)
    biased = torch.where(visible[:, :, None, None], biased, -math.inf)
    row_max = biased.amax(-1).clamp_min(FMIN)
    weights = torch.exp(biased - row_max.unsqueeze(-1))
    out = weighted(weights, values, blocks, visible, size, layout)
    if call.kv_cache_dtype != "auto":
        out = out * per_head(call.v_scale, out.device)[:, None, None]
    return PartialAttention(
        *(part.flatten(2, 3).transpose(1, 2) for part in (out, row_max, weights.sum(-1)))
    )


def _score_scale(call: DecodeCall) -> Tensor | float:
    if call.kv_cache_dtype == "auto":
        return call.scale
    return per_head(call.k_scale, call.query.device)[:, None, None] * call.scale


def _alibi(call: DecodeCall, positions: Tensor) -> Tensor:
    """Returns ``slope * (t - n + 1)``, 0 for the newest token, ``[S, P, Hk, G, N]``."""
    assert call.alibi_slopes is not None
    slopes = call.alibi_slopes.to(call.dtype).view(call.num_kv_heads, -1, 1)
    age = positions - call.seq_lens.view(-1, 1, 1) + 1  # [S, P, N]
    return slopes * age[:, :, None, None].to(call.dtype)


def _empty_partitions(call: DecodeCall, count: int) -> PartialAttention:
    seqs, heads, dim = call.query.shape
    sums = call.query.new_zeros(seqs, heads, count, dtype=call.dtype)
    return PartialAttention(sums.new_zeros(seqs, heads, count, dim), sums + FMIN, sums)


def attend_natively(call: DecodeCall) -> Tensor:
    """Calls the op with each sequence as a request of one query; ``[S, H, D]`` in its dtype."""
    query, size = call.query, call.block_size
    keys = convert_key(call.key_cache, call.layout, "NHD", block_size=size)
    values = convert_value(call.value_cache, call.layout, "NHD", block_size=size)
    keys, values = (stored(cache, call.kv_cache_dtype) for cache in (keys, values))
    # The op knows the width of the table, but not `max_seq_len`.
    lengths = torch.where(call.seq_lens > call.capacity, -1, call.seq_lens)
    starts = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
    scoring = Scoring(float(call.scale), alibi_slopes=call.alibi_slopes)
    step = call.block_tables, lengths, starts, scoring
    scales = _scales(call, call.k_scale, keys), _scales(call, call.v_scale, values)
    return attend_paged(PagedCall(query, keys, values, *step, True, *scales))[0]


def _scales(call: DecodeCall, scale: Scale, cache: Tensor) -> Tensor | None:
    if call.kv_cache_dtype == "auto":
        return None
    return per_head(scale, cache.device).expand(cache.shape[:3])
