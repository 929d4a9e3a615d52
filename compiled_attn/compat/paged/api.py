"""`paged_attention_v1` and `_v2`: decode attention over a paged cache, and its reference."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.attention.dense import attend
from compiled_attn.attention.merge import merge
from compiled_attn.attention.state import FEPS, FMIN, PartialAttention
from compiled_attn.compat.paged.decode import attend_natively, attend_pages, reduce_partitions
from compiled_attn.compat.paged.inputs import DecodeCall, Scale, per_head, stored
from compiled_attn.compat.paged.layouts import Layout, expect, take_blocks
from compiled_attn.compat.paged.validation import check
from compiled_attn.ops import KernelChoice, chooses_native

__all__ = ["PARTITION", "paged_attention_reference", "paged_attention_v1", "paged_attention_v2"]

PARTITION = 512
"""Tokens in a partition of `paged_attention_v2`."""


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
            t is at ``[block, head, d // x, t, d % x]``. Or as in ``layout``. Includes the current
            token.
        value_cache: ``(NB, Hk, D, BS)``, or as in ``layout``.
        num_kv_heads: Hk, a divisor of H; query head h reads KV head ``h // (H // Hk)``.
        scale: factor of the scores.
        block_tables: ints ``(num_seqs, W)``; token t is in block ``block_tables[s, t // BS]``,
            slot ``t % BS``. Entries past a row's last token are never looked up and may be
            anything.
        seq_lens: ints ``(num_seqs,)``, tokens of each sequence including the current one. 0 gives
            zeros.
        block_size: BS, at least 1.
        max_seq_len: upper limit of ``seq_lens``. Inside a compiled graph pass the bucket's limit,
            not the step's.
        alibi_slopes: floats ``(H,)`` or None.
        kv_cache_dtype: "auto" (the query's dtype, without scales), "fp8" or "fp8_e4m3", "fp8_e5m2"
            (caches of these or of uint8), or "int8".
        k_scale, v_scale: real value of a stored 1: a float, or a tensor with 1 element or one for
            each KV head.
        tp_rank: unused without block-sparse attention.
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
            blocksparse_head_sliding_step: must be off; block-sparse attention is not supported.
        layout: layout of both caches, see `Layout`.
        kernel: "native": the C++ kernel or an error, "portable": plain torch, "auto": native if it
            supports the call: on the CPU, layout flat, NHD or HND.

    Returns:
        ``out``.

    Raises:
        PagedArgumentError: (a ``RuntimeError`` and a ``ValueError``) arguments do not match,
            ``out`` shares memory with an index, a sequence is longer than its table row or
            ``max_seq_len``, or one of its tokens is in no block of the cache. ``out`` is unchanged.
            Inside a compiled or captured graph numbers in tensors cannot raise: such a row is NaN,
            and no other row is affected; the native kernel raises (``RuntimeError``).
        KernelArgumentError, NativeUnavailable: ``kernel`` is "native", but it cannot serve the call
            or be built.
        TypeError: an argument is not a tensor or int.

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
    """`paged_attention_v1` with the context split into partitions of 512 tokens.

    The three buffers receive the result of each partition, and ``out`` their reduction; ``P`` is at
    least ``ceil(max_seq_len / 512)``. A partition without a token of its row has sum 0, the lowest
    finite maximum and zeros.

    Args:
        out: as in `paged_attention_v1`, like all arguments not named here.
        exp_sum: float32 ``(num_seqs, H, P)``, sum over the partition of ``exp(score - maximum)``;
            written.
        max_logits: float32 ``(num_seqs, H, P)``, maximum of the scores of the partition; written.
        tmp_out: ``(num_seqs, H, P, D)`` of the query's dtype, attention over the partition alone;
            written.
        kernel: "native" is an error, since that kernel returns no partitions.

    Returns:
        ``out``, equal to that of `paged_attention_v1` up to rounding.

    Raises:
        PagedArgumentError, TypeError: as `paged_attention_v1`; all four outputs are unchanged.
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


@torch.no_grad()
def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    *,
    layout: Layout = "packed",
) -> Tensor:
    """Reference of `paged_attention_v1`, row by row, without checks; returns ``(num_seqs, H, D)``.

    Arguments as in `paged_attention_v1`.
    """
    keys, values = stored(key_cache, kv_cache_dtype), stored(value_cache, kv_cache_dtype)
    out = torch.zeros_like(query)
    for row, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        blocks = block_tables[row, : -(-length // block_size)].long()
        key, value = (
            take_blocks(cache, blocks, layout, block_size, is_key=is_key).flatten(0, 1)[:length]
            for cache, is_key in ((keys, True), (values, False))
        )
        key, value = _real(key, kv_cache_dtype, k_scale), _real(value, kv_cache_dtype, v_scale)
        bias = _bias(alibi_slopes, length, key)
        part = attend(query[row].unsqueeze(0), key, value, bias, scale=scale)
        out[row] = merge(part)[0].to(out.dtype)
    return out


def _real(tokens: Tensor, kv_cache_dtype: str, scale: Scale) -> Tensor:
    if kv_cache_dtype == "auto":
        return tokens
    return tokens.float() * per_head(scale, tokens.device).unsqueeze(-1)


def _bias(slopes: Tensor | None, length: int, like: Tensor) -> Tensor:
    """ALiBi of the newest token, ``[H, 1, length]``, or zeros ``[1, length]``."""
    ages = torch.arange(1 - length, 1, device=like.device)
    return ages.new_zeros(1, length).float() if slopes is None else slopes[:, None, None] * ages


def _refuse_blocksparse(local_blocks: int, vert_stride: int, sliding_step: int) -> None:
    off = local_blocks == 0 and vert_stride in (0, 1) and sliding_step == 0
    given = local_blocks, vert_stride, sliding_step
    remedy = "it is not supported: omit the arguments blocksparse_*"
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
    normalised = parts.out / parts.sum.clamp_min(FEPS).unsqueeze(-1)
    results = (exp_sum, parts.sum, 0.0), (max_logits, parts.max, FMIN), (tmp_out, normalised, 0.0)
    for buffer, part, empty in results:
        buffer[:, :, :count] = part[:, :, :count]
        buffer[:, :, count:] = empty
