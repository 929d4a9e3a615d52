"""Runs a call: checks it, appends the new tokens, attends slice by slice."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.attention.merge import lse, merge, merge_online
from compiled_attn.attention.rotary import apply_rotary
from compiled_attn.attention.state import PartialAttention
from compiled_attn.compat.flash.append import append
from compiled_attn.compat.flash.attend import KeySlice, choose
from compiled_attn.compat.flash.call import FlashCall
from compiled_attn.compat.flash.checks import check_call
from compiled_attn.compat.flash.layout import Layout
from compiled_attn.compat.flash.masks import alibi, query_slots, slots_in_use, visible
from compiled_attn.compat.flash.native import attend_native, request_of
from compiled_attn.compat.flash.numbers import assert_numbers, check_numbers
from compiled_attn.ops import chooses_native
from compiled_attn.ops.tracing import can_read

__all__ = ["run"]

_SCORES_AT_ONCE = 1 << 24
"""Scores of a slice of keys when ``num_splits`` is 0: 64 MiB in float32."""


def run(call: FlashCall, *, null_page: bool = False) -> tuple[Tensor, Tensor]:
    """Out ``[B, Sq, H, D]`` and log-sum-exp ``[B, H, Sq]`` of a call, its new tokens written.

    Args:
        null_page: rows that lie in page 0 alone are padding and see nothing.
    """
    # No decorator: all functions that torch wraps share one code object, and its recompile limit.
    with torch.no_grad():
        check_call(call)
        lengths = call.lengths()
        longest = call.capacity
        if can_read(call.q):
            longest = check_numbers(call, lengths)
        else:
            assert_numbers(call, lengths)
        is_native = chooses_native(call.kernel, request_of(call))
        layout = Layout.of(call, lengths)
        if null_page:
            layout = layout.without_null_rows()
        query = _append(call, lengths, layout)
        if is_native:
            return attend_native(call, query, layout)
        whole = _attend(call, query, layout, max(longest, 1))
        return merge(whole).transpose(1, 2).to(call.q.dtype), lse(whole)


def _append(call: FlashCall, lengths: Tensor, layout: Layout) -> Tensor:
    """Writes the new tokens; returns the queries, rotated if the call says so."""
    if call.k is None or call.v is None:
        return call.q
    query, key = call.q, call.k
    positions = _from(lengths, call.new_tokens)
    if call.rotary_cos is not None and call.rotary_sin is not None:
        tables = call.rotary_cos, call.rotary_sin
        turn = _from(lengths, query.shape[1], step=int(call.queries_turn))
        query = apply_rotary(query, *tables, turn, interleaved=call.rotary_interleaved)
        key = apply_rotary(key, *tables, positions, interleaved=call.rotary_interleaved)
    page, slot = layout.place(positions)
    append(call.k_cache, page, slot, key)
    append(call.v_cache, page, slot, call.v)
    return query


def _attend(call: FlashCall, query: Tensor, layout: Layout, longest: int) -> PartialAttention:
    """Attends to the first ``longest`` tokens of every row, slice by slice."""
    at = query_slots(layout.totals, query.shape[1])
    attend = choose(query, call.k_cache.shape[2], call.softcap)
    splits = _splits(call, longest)

    def part(start: int, end: int) -> PartialAttention:
        slots = torch.arange(start, end, device=query.device)
        used = slots_in_use(slots, layout.totals, layout.leftpad)
        seen = visible(slots, used, at, call.window)
        if seen.shape[1] == 1:  # what one query does not see need not be read as it is
            used = seen.squeeze(1)
        keys = KeySlice(
            query,
            layout.read(call.k_cache, start, end, used),
            layout.read(call.v_cache, start, end, used),
            seen,
            None if call.alibi_slopes is None else alibi(call.alibi_slopes, slots, at),
            call.scale,
            call.softcap,
        )
        return attend(keys if splits <= 1 else keys.widened())

    if splits <= 1:  # apart from the loop, which would make a dynamic length static
        return part(0, longest)
    width = -(-longest // splits)
    whole = part(0, min(width, longest))
    for start in range(width, longest, width):
        whole = merge_online(whole, part(start, min(start + width, longest)))
    return whole


def _splits(call: FlashCall, longest: int) -> int:
    batch, queries, heads, _ = call.q.shape
    return call.num_splits or -(-batch * heads * queries * longest // _SCORES_AT_ONCE)


def _from(start: Tensor, count: int, step: int = 1) -> Tensor:
    """``[B] -> [B, count]``: start, start + step, .."""
    return start.unsqueeze(1) + torch.arange(count, device=start.device) * step
