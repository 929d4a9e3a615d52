"""The definition of `flash_attn_with_kvcache`: row by row and head by head, nothing clever."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compiled_attn.attention.nonfinite import are_sound, hurt, only
from compiled_attn.attention.rotary import apply_rotary
from compiled_attn.compat.flash.call import FlashCall
from compiled_attn.compat.flash.checks import check, check_bounds

__all__ = ["flash_attn_with_kvcache_reference"]


@torch.no_grad()
def flash_attn_with_kvcache_reference(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """What `flash_attn_with_kvcache` computes, writes and raises for the same arguments; eager
    only.

    ``num_splits`` has no effect.
    """
    call = FlashCall(*args, **kwargs)
    check(call)
    lengths = call.lengths()
    check_bounds(call, lengths)
    rows = [_row(call, row, int(length)) for row, length in enumerate(lengths)]
    out, lse = (torch.stack(each) for each in zip(*rows, strict=True))
    return (out.to(call.q.dtype), lse) if call.return_softmax_lse else out.to(call.q.dtype)


def _row(call: FlashCall, row: int, length: int) -> tuple[Tensor, Tensor]:
    """Appends to and attends one row: out ``[Sq, H, D]``, lse ``[H, Sq]``."""
    total = length + call.new_tokens
    query = call.q[row]
    pages, slots = _places(call, row, total)
    if call.k is not None and call.v is not None:
        key = call.k[row]
        if call.rotary_cos is not None and call.rotary_sin is not None:
            tables, pairing = (call.rotary_cos, call.rotary_sin), call.rotary_interleaved
            turn = length + torch.arange(query.shape[0], device=query.device) * call.queries_turn
            query = apply_rotary(query, *tables, turn, interleaved=pairing)
            turn = length + torch.arange(key.shape[0], device=key.device)
            key = apply_rotary(key, *tables, turn, interleaved=pairing)
        call.k_cache[pages[length:], slots[length:]] = key
        call.v_cache[pages[length:], slots[length:]] = call.v[row]
    pad = 0 if call.cache_leftpad is None else int(call.cache_leftpad[row])
    own = pages[pad:], slots[pad:]
    return _attend_row(call, row, query, call.k_cache[own], call.v_cache[own])


def _places(call: FlashCall, row: int, total: int) -> tuple[Tensor, Tensor]:
    """Page and slot of each of the row's tokens."""
    tokens = torch.arange(total, device=call.q.device)
    source = row if call.cache_batch_idx is None else int(call.cache_batch_idx[row])
    if call.block_table is None:
        return torch.full_like(tokens, source), tokens
    return call.block_table[source, tokens // call.page_size].long(), tokens % call.page_size


def _attend_row(
    call: FlashCall, row: int, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    group = query.shape[1] // key.shape[1]
    i = torch.arange(query.shape[0], device=query.device).unsqueeze(1) + len(key) - len(query)
    j = torch.arange(len(key), device=query.device)
    left, right = call.window
    visible = torch.ones_like(i - j, dtype=torch.bool)
    visible &= j >= i - left if left >= 0 else visible
    visible &= j <= i + right if right >= 0 else visible
    sound = are_sound(value)
    value, harm = only(sound, value), hurt(visible, sound).unsqueeze(-1)
    outs, lses = [], []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // group].T * call.scoring.scale
        if call.softcap > 0:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.alibi_slopes is not None:
            slopes = call.alibi_slopes if call.alibi_slopes.dim() == 1 else call.alibi_slopes[row]
            scores = scores - slopes[head].to(dtype) * (i - j).abs()
        scores = scores.masked_fill(~visible, -math.inf)
        weights = torch.softmax(scores, -1).masked_fill(~visible, 0)  # NaN where no key is seen
        outs.append(weights @ value[:, head // group] + harm)
        lses.append(torch.logsumexp(scores, -1))
    return torch.stack(outs, 1), torch.stack(lses)
