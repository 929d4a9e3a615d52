"""`flash_attn_with_kvcache` of FlashAttention 2 on any device, and its reference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compiled_attn.attention.dense import attend
from compiled_attn.attention.merge import lse as log_sum_exp
from compiled_attn.attention.merge import merge
from compiled_attn.compat.flash.forward import forward
from compiled_attn.compat.flash.inputs import FlashCall
from compiled_attn.compat.flash.validation import check, check_bounds
from compiled_attn.ops import KernelChoice

__all__ = ["flash_attn_with_kvcache", "flash_attn_with_kvcache_reference"]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    kernel: KernelChoice = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends new tokens to a KV cache in place, then attends queries to all tokens of their row.

    Row b has ``L = cache_seqlens[b]`` tokens in the cache before the call, including its left pad,
    and ``L + Sn`` after it. The queries are its last tokens: query i has position
    ``L + Sn - Sq + i`` (bottom-right alignment). There is no backward.

    Args:
        q: ``[B, Sq, H, D]``, not modified. float16, bfloat16, float32 or float64; ``D <= 256``.
        k_cache, v_cache: ``[Bc, Sc, Hk, D]``, or pages ``[NP, P, Hk, D]`` of any size P with
            ``block_table``. Any strides but the last, which is 1; views are written through.
            Query head h reads key head ``h // (H // Hk)``; ``H % Hk == 0``. Slots without a
            token of a row may hold NaN.
        k, v: ``[B, Sn, Hk, D]``, written to positions ``L .. L + Sn - 1`` before attending; both or
            neither.
        rotary_cos, rotary_sin: ``[R, rd / 2]``, contiguous, ``rd % 16 == 0``, R at least the cache
            length. Rotate the first rd elements of k (by its position) and of q; only with k. Query
            i is rotated as position ``L + i`` if ``causal`` or a window is set, else as position
            ``L``.
        cache_seqlens: ints ``[B]`` or an int. None: the cache is full, only without k.
        cache_batch_idx: ints ``[B]``, row of the contiguous cache (or of ``block_table``) for each
            batch row; None: row b.
        cache_leftpad: ints ``[B]``, slots at the start of each row that are not part of its
            sequence.
        block_table: ints ``[B, W]``; token t of row b is in page ``block_table[b, t // P]``, slot
            ``t % P``. Entries past a row's last token are never looked up and may be anything.
        softmax_scale: factor of the scores; None: ``D ** -0.5``.
        causal: a query sees nothing to the right of its own position.
        window_size: visible tokens to the left and right of a query; -1: all. ``causal`` overrides
            the right side.
        softcap: cap c of ``c * tanh(score / c)`` if positive.
        rotary_interleaved: True pairs (0, 1), (2, 3), ..; False pairs (i, i + rd / 2).
        alibi_slopes: float32 ``[H]`` or ``[B, H]``; adds ``-slope * distance`` to the capped
            scores.
        num_splits: slices of the keys, attended to one after the other, 0 to 128; 0: as few as keep
            the scores of a slice under 64 MiB. Changes the result by rounding only.
        return_softmax_lse: also return the log-sum-exp of the scores.
        kernel: "native": the C++ kernel or an error, "portable": plain torch, "auto": native if it
            supports the call (docs/reference/kernels.md). The native kernel ignores ``num_splits``.

    Returns:
        ``[B, Sq, H, D]`` in q's dtype, zeros if a query sees no key. With ``return_softmax_lse``
        also ``[B, H, Sq]`` in float32 (float64 for float64 q), natural logarithm, -inf where a
        query sees no key.

    Raises:
        FlashArgumentError: (a ``RuntimeError`` and a ``ValueError``) arguments do not match; new
            tokens or an integer tensor share memory with a cache that is written; a row has no room
            for its new tokens; a page that a row uses does not exist, or gets two new tokens in one
            slot. Nothing is written. Inside a compiled or captured graph, numbers in tensors are
            not read but asserted (``RuntimeError``).
        KernelArgumentError, NativeUnavailable: ``kernel`` is "native", but it cannot serve the call
            or be built. Nothing is written.
        TypeError: an argument is not a tensor or number.

    Source: ``flash_attn_with_kvcache`` of FlashAttention 2.8 (Dao et al.); see
    docs/reference/flash.md for the differences.
    """
    call = FlashCall(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, softmax_scale, causal, window_size, softcap,
        rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse, kernel,
    )  # fmt: skip
    out, lse = forward(call)
    return (out, lse) if return_softmax_lse else out


@torch.no_grad()
def flash_attn_with_kvcache_reference(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Reference of `flash_attn_with_kvcache`, row by row; eager only.

    Computes, writes and raises the same for the same arguments; ignores ``num_splits``.
    """
    call = FlashCall(*args, **kwargs)
    check(call)
    lengths = call.lengths()
    check_bounds(call, lengths)
    rows = [_row(call, row, int(length)) for row, length in enumerate(lengths)]
    out, lse = (torch.stack(each) for each in zip(*rows, strict=True))
    return (out.to(call.q.dtype), lse) if call.return_softmax_lse else out.to(call.q.dtype)


def _row(call: FlashCall, row: int, length: int) -> tuple[Tensor, Tensor]:
    total = length + call.new_tokens
    query = call.q[row]
    pages, slots = _slots(call, row, total)
    if call.k is not None and call.v is not None:
        at = torch.arange(len(query), device=query.device) * call.rotates_by_position
        query = call.rotated(query, length + at)
        positions = torch.arange(length, total, device=query.device)
        call.k_cache[pages[length:], slots[length:]] = call.rotated(call.k[row], positions)
        call.v_cache[pages[length:], slots[length:]] = call.v[row]
    pad = 0 if call.cache_leftpad is None else int(call.cache_leftpad[row])
    own = pages[pad:], slots[pad:]
    return _attend_row(call, row, query, call.k_cache[own], call.v_cache[own])


def _slots(call: FlashCall, row: int, total: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(total, device=call.q.device)
    source = row if call.cache_batch_idx is None else int(call.cache_batch_idx[row])
    if call.block_table is None:
        return torch.full_like(tokens, source), tokens
    return call.block_table[source, tokens // call.page_size].long(), tokens % call.page_size


def _attend_row(
    call: FlashCall, row: int, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    queries, heads, dim = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    if not len(key):
        lowest = query.new_full((heads, queries), -math.inf, dtype=dtype)
        return query.new_zeros(queries, heads, dim, dtype=dtype), lowest
    i = torch.arange(queries, device=query.device).unsqueeze(1) + len(key) - queries
    j = torch.arange(len(key), device=query.device)
    left, right = call.window
    hidden = torch.zeros_like(i - j, dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    bias = (i - j).abs().to(dtype).neg()
    slopes = call.alibi_slopes
    if slopes is None:
        bias = torch.zeros_like(bias)
    else:
        slopes = slopes if slopes.dim() == 1 else slopes[row]
        bias = slopes.to(dtype)[:, None, None] * bias
    bias = bias.masked_fill(hidden, -math.inf)
    scoring = call.scoring
    part = attend(query, key, value, bias, scale=scoring.scale, softcap=scoring.softcap)
    return merge(part), log_sum_exp(part).T
