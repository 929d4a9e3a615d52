"""The reference of `paged_attention` and `paged_attention_`: request by request, in torch.

Tests compare all kernels with it; it also implements the ops where no kernel can be built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compiled_attn.attention.dense import attend
from compiled_attn.attention.merge import lse as log_sum_exp
from compiled_attn.attention.merge import merge
from compiled_attn.attention.parts import partial_attn_sinks
from compiled_attn.attention.scoring import by_position
from compiled_attn.cache.quantisation import QUANTISED, dequantise, quantise
from compiled_attn.ops.call import NewTokens, PagedCall
from compiled_attn.ops.checks import check

__all__ = ["paged_attention", "paged_attention_"]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    segment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the attention of any mix of requests over a paged cache.

    Row i of a request's n query rows has position ``seq_lens - n + i`` and sees the keys up to its
    own position; a row before position 0 sees nothing. Scores are ``scale * q . k``, capped, plus
    ALiBi, in this order; the softmax is computed in float32 or more.

    Args:
        query: ``[T, H, D]``, float32, bfloat16, float16 (the reference: also float64); last stride
            1.
        key_cache: ``[num_blocks, block_size, Hk, D]``, last stride 1, others any (a view of HND
            works); the query's dtype, or int8, float8_e4m3fn, float8_e5m2 with scales. Query head h
            reads KV head ``h // (H // Hk)``.
        value_cache: ``[num_blocks, block_size, Hk, Dv]``; may be a view of ``key_cache``.
        block_table: ``[R, W]`` int32. Only the first ``ceil(seq_len / block_size)`` entries of a
            row are read.
        seq_lens: ``[R]`` int32, keys of each request including this step's; 0 for padding.
        query_start_loc: ``[R + 1]`` int32; request r has the query rows ``query_start_loc[r]`` to
            ``query_start_loc[r + 1]``.
        scale: factor of the scores, usually ``D ** -0.5``.
        causal: False: every row sees all keys of its request.
        window: keys that a row sees, including its own; only if causal. None: no limit.
        softcap: cap c of ``c * tanh(score / c)``.
        alibi_slopes: ``[H]`` float32; adds ``slope * (key position - query position)``.
        sinks: ``[H]`` float32, score of an extra key without a value.
        key_scale, value_scale: ``[num_blocks, block_size, Hk]`` float32, scales of an int8 or fp8
            cache.
        segment: keys that a softmax starts with, a multiple of 64: the bits of a row then depend on
            what it sees alone. None: also on how many rows of its request are in the step.

    Returns:
        ``[T, H, Dv]`` in the query's dtype and the log-sum-exp ``[T, H]`` in float32. A row that
        sees nothing, or belongs to no request, is zero, its lse -inf or the sink's score.

    Raises:
        KernelArgumentError: invalid shapes, dtypes or indices (``RuntimeError`` in a graph that
            calls C++).
    """
    call = PagedCall.of(
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale,
        causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        key_scale=key_scale, value_scale=value_scale, segment=segment,
    )  # fmt: skip
    check(call)
    return _attend_requests(call)


def paged_attention_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *step: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Writes this step's keys and values to the caches in place, then computes attention.

    Args:
        key: ``[T, Hk, D]`` in the query's dtype.
        value: ``[T, Hk, Dv]`` in the query's dtype.
        slot_mapping: ``[T]`` int64, slot ``block * block_size + offset`` of each token; padding
            points to null block 0.
        step, options: as in `paged_attention`; the scales are written too.

    Results and errors are those of `paged_attention`; after an error nothing is written. Caches
    must not share memory with other arguments.
    """
    new = NewTokens(key, value, slot_mapping)
    call = PagedCall.of(query, key_cache, value_cache, *step, new=new, **options)
    check(call)
    _write(key_cache, key, slot_mapping, call.key_scale)
    _write(value_cache, value, slot_mapping, call.value_scale)
    return _attend_requests(call)


def _attend_requests(call: PagedCall) -> tuple[Tensor, Tensor]:
    query, window, sinks = call.query, call.scoring.window, call.scoring.sinks
    tokens, heads, _ = query.shape
    out = query.new_zeros(tokens, heads, call.value_cache.shape[-1])
    lse = query.new_full((tokens, heads), -math.inf, dtype=torch.float32)
    if sinks is not None:
        lse = sinks.float().expand(tokens, heads).clone()
    for request, rows, length in _rows_of_requests(call):
        count = rows.stop - rows.start
        first = max(0, length - count - window + 1) if window else 0  # invisible to all rows
        if not count or first >= length:
            continue
        table = call.block_table[request]
        key = _read(call.key_cache, table, first, length, call.key_scale)
        value = _read(call.value_cache, table, first, length, call.value_scale)
        part, part_lse = _attend(query[rows], key, value, first, length, call)
        out[rows], lse[rows] = part.to(out.dtype), part_lse.to(lse.dtype)
    return out, lse


def _rows_of_requests(call: PagedCall) -> Iterator[tuple[int, slice, int]]:
    """Yields each request, its rows and keys; with segments each row alone, as a matrix product may
    depend on other rows."""
    bounds = call.query_start_loc.tolist()
    for request, length in enumerate(call.seq_lens.tolist()):
        begin, end = bounds[request], bounds[request + 1]
        if call.segment is None:
            yield request, slice(begin, end), length
            continue
        for row in range(begin, end):
            yield request, slice(row, row + 1), length - (end - row - 1) * call.causal


def _read(cache: Tensor, table: Tensor, first: int, length: int, scale: Tensor | None) -> Tensor:
    """Rows ``first .. length - 1`` of a request, ``[m, Hk, D]``."""
    size = cache.shape[1]
    start = first // size
    blocks = table[start : -(-length // size)].long()
    rows = slice(first - start * size, length - start * size)
    read = _bytes(cache)[blocks].view(cache.dtype).flatten(0, 1)[rows]
    return read if scale is None else dequantise(read, scale[blocks].flatten(0, 1)[rows])


def _write(cache: Tensor, new: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    size = cache.shape[1]
    at = slots // size, slots % size
    if cache.dtype in QUANTISED and scale is not None:
        codes, row_scales = quantise(new, cache.dtype)
        _bytes(cache)[at] = _bytes(codes)
        scale[at] = row_scales
    else:
        cache[at] = new.to(cache.dtype)


def _bytes(codes: Tensor) -> Tensor:
    """float8 as bytes, since not every device can index it; others unchanged."""
    return codes.view(torch.uint8) if codes.dtype in QUANTISED else codes


def _attend(
    query: Tensor, key: Tensor, value: Tensor, first: int, length: int, call: PagedCall
) -> tuple[Tensor, Tensor]:
    """One request: query ``[n, H, D]``, keys ``first .. length - 1`` ``[m, Hk, ..]`` -> out
    ``[n, H, Dv]``, lse ``[n, H]``.
    """
    scoring = call.scoring
    position = torch.arange(length - len(query), length, device=query.device)
    keys = torch.arange(first, length, device=query.device)
    later = keys > position.unsqueeze(1) if call.causal else torch.tensor(False)
    bias = torch.zeros(len(position), len(keys)).masked_fill(later, -math.inf)
    bias = by_position(bias, position, keys, scoring.window, scoring.slopes_for(query))
    part = attend(query, key, value, bias, scale=scoring.scale, softcap=scoring.softcap)
    parts = part, partial_attn_sinks(scoring.sinks, part)
    return merge(*parts), log_sum_exp(*parts)
