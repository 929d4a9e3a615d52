"""`paged_attention_v1` and `_v2`: decode attention over a paged cache, on any device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from compiled_attn.attention.scoring import Scoring
from compiled_attn.attention.state import FEPS, FMIN, PartialAttention
from compiled_attn.compat.paged.block_tables import lost_rows, pages
from compiled_attn.compat.paged.call import DecodeCall
from compiled_attn.compat.paged.checks import check
from compiled_attn.compat.paged.layouts import Layout, convert_key, convert_value, expect
from compiled_attn.compat.paged.products import scores, weighted
from compiled_attn.compat.paged.scales import Scale, per_head, stored
from compiled_attn.ops import KernelChoice, PagedCall, attend_paged, chooses_native

__all__ = [
    "PARTITION",
    "attend_pages",
    "paged_attention_v1",
    "paged_attention_v2",
    "reduce_partitions",
]

PARTITION = 512
"""Tokens of a partition of `paged_attention_v2`."""

_GATHERED_AT_ONCE = 1 << 21
"""Elements of gathered keys at a time, eagerly: memory that the allocator keeps is much faster."""


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    layout: Layout = "packed",
    kernel: KernelChoice = "auto",
) -> Tensor:
    """Attends one query of each sequence to all tokens of that sequence in the cache.

    The score of the token at position t of a sequence of n tokens is ``scale * q . k_t + slope * (t
    - n + 1)``; the softmax over ``t < n`` is taken in float32 (float64 for float64). There is no
    backward.

    Args:
        out: ``(num_seqs, H, D)`` of the query's dtype, any strides; written.
        query: ``(num_seqs, H, D)``, any strides. float16, bfloat16, float32 or float64.
        key_cache: ``(NB, Hk, D/x, BS, x)`` with ``x = 16 // element size``: element d of token slot
            t is at ``[block, head, d // x, t, d % x]``. Or as ``layout`` says. The current token is
            already in it.
        value_cache: ``(NB, Hk, D, BS)``, or as ``layout`` says.
        num_kv_heads: Hk, a divisor of H; query head h reads KV head ``h // (H // Hk)``.
        scale: factor of the scores.
        block_tables: ints ``(num_seqs, W)``; token t lies in block ``block_tables[s, t // BS]``,
            slot ``t % BS``. Entries past a row's last token are never looked up and may be
            anything.
        seq_lens: ints ``(num_seqs,)``, tokens of each sequence, the current one included. 0 gives
            zeros.
        block_size: BS, at least 1.
        max_seq_len: upper limit of ``seq_lens``. Inside a compiled graph pass the bucket's limit,
            not the step's.
        alibi_slopes: floats ``(H,)`` or None.
        kv_cache_dtype: "auto" (the query's dtype, scales unused), "fp8" or "fp8_e4m3", "fp8_e5m2"
            (caches of these or of uint8), or "int8".
        k_scale, v_scale: real value of a stored 1: a float, or a tensor with 1 element or one for
            each KV head.
        tp_rank: unused without block-sparse attention.
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
            blocksparse_head_sliding_step: must be off; block-sparse attention is not supported.
        layout: of both caches, see `Layout`.
        kernel: "native": the C++ kernel or an error, "portable": plain torch, "auto": native where
            it supports the call: on the CPU, layout flat, NHD or HND.

    Returns:
        ``out``.

    Raises:
        PagedArgumentError: (a ``RuntimeError`` and a ``ValueError``) the arguments do not fit
            together, ``out`` lies in the memory of an index, a sequence is longer than its table
            row or ``max_seq_len``, or one of its tokens lies in no block of the cache. ``out`` is
            as it was. What depends on numbers in tensors cannot be an error inside a compiled or
            captured graph: there such a row is NaN, and no other row is touched; the native kernel
            raises there too (``RuntimeError``).
        KernelArgumentError, NativeUnavailable: ``kernel`` is "native", but it cannot serve the call
            or be built here.
        TypeError: an argument that must be a tensor or an int is none.

    Source: PagedAttention (Kwon et al., SOSP 2023); argument order of vLLM's ``_custom_ops``.
    docs/reference/paged.md lists the differences.
    """
    _refuse_blocksparse(
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_head_sliding_step
    )
    call = DecodeCall(
        query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size,
        max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, layout,
    )  # fmt: skip
    lengths = check(call, out=out)
    _check_out(call, out)
    with torch.no_grad():
        if chooses_native(kernel, call.traits()):
            return out.copy_(attend_natively(call))
        return out.copy_(reduce_partitions(attend_pages(call, lengths)))


def paged_attention_v2(
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    layout: Layout = "packed",
    kernel: KernelChoice = "auto",
) -> Tensor:
    """`paged_attention_v1` with the context split into partitions of 512 tokens, attended to
    separately.

    The three buffers receive what each partition found, and ``out`` its reduction; ``P`` is at
    least ``ceil(max_seq_len / 512)``. A partition without a token of its row has sum 0, the least
    finite maximum and zeros.

    Args:
        out: as in `paged_attention_v1`, like all arguments not named here.
        exp_sum: float32 ``(num_seqs, H, P)``, sum over the partition of ``exp(score - maximum)``;
            written.
        max_logits: float32 ``(num_seqs, H, P)``, maximum of the scores of the partition; written.
        tmp_out: ``(num_seqs, H, P, D)`` of the query's dtype, attention over the partition alone;
            written.
        kernel: "native" is an error, since that kernel gives no partitions.

    Returns:
        ``out``, equal to that of `paged_attention_v1` up to rounding.

    Raises:
        PagedArgumentError, TypeError: as `paged_attention_v1`; all four outputs are as they were.
    """
    _refuse_blocksparse(
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_head_sliding_step
    )
    call = DecodeCall(
        query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size,
        max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, layout,
    )  # fmt: skip
    lengths = check(call, out=out, exp_sum=exp_sum, max_logits=max_logits, tmp_out=tmp_out)
    _check_out(call, out)
    _check_partials(call, exp_sum, max_logits, tmp_out)
    chooses_native(kernel, call.traits(partitions=True))  # never, but "native" is an error
    with torch.no_grad():
        parts = attend_pages(call, lengths, PARTITION)
        _write_partials(parts, exp_sum, max_logits, tmp_out)
        return out.copy_(reduce_partitions(parts))


def attend_pages(
    call: DecodeCall, lengths: list[int] | None, partition: int | None = None
) -> PartialAttention:
    """Attention of a checked call, every ``partition`` tokens apart (None: P = 1).

    Args:
        call: checked by `check`.
        lengths: what that returned, the numbers in ``seq_lens``; None: unknown.
        partition: tokens of a partition.

    Returns:
        out ``[S, H, P, D]`` (not normalised), max and sum ``[S, H, P]``, in ``call.dtype``.
    """
    if lengths is not None:
        return _attend_known(call, lengths, partition)
    width = -(-call.capacity // call.block_size)
    empty = width == 0 or 0 in call.key_cache.shape
    parts = _nothing(call, 1) if empty else _attend(call, width, partition)
    # A graph cannot raise for what it finds in a tensor, nor may it answer from other blocks.
    lost = lost_rows(call)[:, None, None]
    return parts._replace(out=torch.where(lost.unsqueeze(-1), math.nan, parts.out))


def reduce_partitions(parts: PartialAttention) -> Tensor:
    """Attention over all partitions, ``[S, H, P, D] -> [S, H, D]``; no token gives zeros."""
    row_max = parts.max.amax(-1, keepdim=True)
    factor = torch.exp(parts.max - row_max)
    total = (parts.sum * factor).sum(-1, keepdim=True)
    return (parts.out * factor.unsqueeze(-1)).sum(-2) / total.clamp_min(FEPS)


def _attend_known(call: DecodeCall, lengths: list[int], partition: int | None) -> PartialAttention:
    """Attention of a few rows at a time, each slice as wide as its longest row needs."""
    count = -(-max(lengths, default=0) // partition) if partition else 1
    parts = _nothing(call, max(count, 1))
    for rows in _slices(lengths, _GATHERED_AT_ONCE // (call.num_kv_heads * call.query.shape[2])):
        longest = max(lengths[rows])
        if longest:
            few = replace(
                call,
                query=call.query[rows],
                block_tables=call.block_tables[rows],
                seq_lens=call.seq_lens[rows],
            )
            found = _attend(few, -(-longest // call.block_size), partition)
            for whole, part in zip(parts, found, strict=True):
                whole[rows, :, : part.shape[2]] = part[:, :, :count]
    return parts


def _slices(lengths: list[int], limit: int) -> Iterator[slice]:
    """Consecutive rows, as many at a time as padded to their longest have ``limit`` tokens."""
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
    """``scale``, and what turns stored keys to real ones, ``[Hk, 1, 1]``."""
    if call.kv_cache_dtype == "auto":
        return call.scale
    return per_head(call.k_scale, call.query.device)[:, None, None] * call.scale


def _alibi(call: DecodeCall, positions: Tensor) -> Tensor:
    """``slope * (t - n + 1)``, 0 for the newest token, ``[S, P, Hk, G, N]``."""
    assert call.alibi_slopes is not None
    slopes = call.alibi_slopes.to(call.dtype).view(call.num_kv_heads, -1, 1)
    age = positions - call.seq_lens.view(-1, 1, 1) + 1  # [S, P, N]
    return slopes * age[:, :, None, None].to(call.dtype)


def _nothing(call: DecodeCall, count: int) -> PartialAttention:
    """Partitions in which no row sees a token."""
    seqs, heads, dim = call.query.shape
    sums = call.query.new_zeros(seqs, heads, count, dtype=call.dtype)
    return PartialAttention(sums.new_zeros(seqs, heads, count, dim), sums + FMIN, sums)


def attend_natively(call: DecodeCall) -> Tensor:
    """Attention ``[S, H, D]`` in the query's dtype: every sequence is a request of one query."""
    query, size = call.query, call.block_size
    keys = convert_key(call.key_cache, call.layout, "NHD", block_size=size)
    values = convert_value(call.value_cache, call.layout, "NHD", block_size=size)
    keys, values = (stored(cache, call.kv_cache_dtype) for cache in (keys, values))
    out, _ = attend_paged(
        PagedCall(
            query,
            keys,
            values,
            call.block_tables,
            # The op knows the width of the table, but not `max_seq_len`.
            torch.where(call.seq_lens > call.capacity, -1, call.seq_lens),
            torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device),
            Scoring(float(call.scale), alibi_slopes=call.alibi_slopes),
            key_scale=_scales(call, call.k_scale, keys),
            value_scale=_scales(call, call.v_scale, values),
        )
    )
    return out


def _scales(call: DecodeCall, scale: Scale, cache: Tensor) -> Tensor | None:
    """One scale a head for all tokens: a view of it as the op reads scales."""
    if call.kv_cache_dtype == "auto":
        return None
    return per_head(scale, cache.device).expand(cache.shape[:3])


def _refuse_blocksparse(local_blocks: int, vert_stride: int, sliding_step: int) -> None:
    """Raises unless block-sparse attention is off: dense attention is not what was asked for."""
    off = local_blocks == 0 and vert_stride in (0, 1) and sliding_step == 0
    given = local_blocks, vert_stride, sliding_step
    remedy = "it is not supported: leave the arguments blocksparse_* out"
    expect(off, "block-sparse attention to be off (0)", given, remedy)


def _check_out(call: DecodeCall, out: Tensor) -> None:
    query = call.query
    expect.tensor("out", out, "like query", query.shape, (query.dtype,), query)
    expect.not_expanded(out, what="outputs")


def _check_partials(call: DecodeCall, exp_sum: Tensor, max_logits: Tensor, tmp_out: Tensor) -> None:
    query, floats = call.query, (torch.float32,)
    seqs, heads, dim = query.shape
    expect.tensor("exp_sum", exp_sum, "(num_seqs, H, P)", (seqs, heads, None), floats, query)
    shape = (seqs, heads, max(exp_sum.shape[-1], -(-call.max_seq_len // PARTITION)))
    legend = f"(num_seqs, H, P) with P for max_seq_len tokens, {PARTITION} each,"
    expect.tensor("exp_sum", exp_sum, legend, shape)
    expect.tensor("max_logits", max_logits, "like exp_sum", shape, floats, query)
    legend = "(num_seqs, H, P, D)"
    expect.tensor("tmp_out", tmp_out, legend, (*shape, dim), (query.dtype,), query)
    expect.not_expanded(exp_sum, max_logits, tmp_out, what="outputs")


def _write_partials(
    parts: PartialAttention, exp_sum: Tensor, max_logits: Tensor, tmp_out: Tensor
) -> None:
    count = min(parts.sum.shape[-1], exp_sum.shape[-1])
    exp_sum[..., :count] = parts.sum[..., :count]
    exp_sum[..., count:] = 0
    max_logits[..., :count] = parts.max[..., :count]
    max_logits[..., count:] = FMIN
    normalised = parts.out / parts.sum.clamp_min(FEPS).unsqueeze(-1)
    tmp_out[..., :count, :] = normalised[..., :count, :]
    tmp_out[..., count:, :] = 0
