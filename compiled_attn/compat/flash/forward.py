"""Implements `flash_attn_with_kvcache`: validates, appends, attends.

Masks and the ALiBi bias count in cache slots. Query i of a row whose sequence ends before slot
``total`` has slot ``total - Sq + i`` (bottom-right alignment); a left pad shifts queries and keys
alike, so it cancels out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.arguments import can_read
from compiled_attn.attention.merge import lse, merge, merge_online
from compiled_attn.attention.state import PartialAttention
from compiled_attn.compat.flash.inputs import FlashCall, PageTable
from compiled_attn.compat.flash.key_slice import KeySlice, select_attend
from compiled_attn.compat.flash.validation import assert_bounds, check, check_bounds
from compiled_attn.ops import PagedCall, attend_paged, chooses_native, write_rows

__all__ = ["forward"]

_SCORES_AT_ONCE = 1 << 24
"""Scores of a slice of keys if ``num_splits`` is 0: 64 MiB in float32."""


def _alibi(slopes: Tensor, slots: Tensor, at: Tensor) -> Tensor:
    """Returns the bias ``-slope * distance``, ``[B, H, Sq, N]``, for slopes ``[H]`` or ``[B, H]``.

    Source: ALiBi (Press et al., 2022) in FlashAttention's symmetric form.
    """
    distance = (slots - at.unsqueeze(2)).abs().unsqueeze(1)  # [B, 1, Sq, N]
    return -slopes.view(-1, slopes.shape[-1], 1, 1) * distance


def forward(call: FlashCall, *, null_page: bool = False) -> tuple[Tensor, Tensor]:
    """Writes new tokens; returns out ``[B, Sq, H, D]`` and log-sum-exp ``[B, H, Sq]``.

    Args:
        null_page: rows that are in page 0 only are padding and see nothing.
    """
    # Not a decorator: all decorated functions share one code object and its recompile limit.
    with torch.no_grad():
        check(call)
        lengths = call.lengths()
        longest = call.capacity
        if can_read(call.q):
            longest = check_bounds(call, lengths)
        else:
            assert_bounds(call, lengths)
        native = chooses_native(call.kernel, call.traits())
        pages = PageTable.of(call, lengths)
        if null_page:
            pages = pages.without_null_rows()
        query = _append(call, lengths, pages)
        if native:
            return _attend_natively(call, query, pages)
        whole = _attend(call, query, pages, max(longest, 1))
        return merge(whole).transpose(1, 2).to(call.q.dtype), lse(whole)


def _append(call: FlashCall, lengths: Tensor, pages: PageTable) -> Tensor:
    """Writes the new tokens; returns the queries, rotated if needed."""
    if call.k is None or call.v is None:
        return call.q
    query, key = call.q, call.k
    positions = _range(lengths, call.new_tokens)
    if call.rotary_cos is not None:
        at = _range(lengths, query.shape[1], step=int(call.rotates_by_position))
        query, key = call.rotated(query, at), call.rotated(key, positions)
    page, slot = pages.locate(positions)
    write_rows(call.k_cache, page, slot, key)
    write_rows(call.v_cache, page, slot, call.v)
    return query


def _attend_natively(call: FlashCall, query: Tensor, pages: PageTable) -> tuple[Tensor, Tensor]:
    """Calls the op with rows as requests; a row that is all left pad is padding."""
    batch, queries = query.shape[:2]
    table = pages.table
    if table is None:
        table = torch.arange(batch, device=query.device).unsqueeze(1)
    totals = pages.totals
    if pages.leftpad is not None:
        totals = torch.where(pages.leftpad >= totals, 0, totals)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * queries
    caches, causal = (call.k_cache, call.v_cache), call.window[1] == 0
    rows = query.flatten(0, 1)
    paged = PagedCall(rows, *caches, table, totals, starts, call.scoring, causal)
    out, log_sum = (each.unflatten(0, (batch, queries)) for each in attend_paged(paged))
    return out, log_sum.transpose(1, 2)


def _attend(call: FlashCall, query: Tensor, pages: PageTable, longest: int) -> PartialAttention:
    at = _range(pages.totals - query.shape[1], query.shape[1])  # slots, [B, Sq]
    left, right = call.window
    attend = select_attend(query, call.k_cache.shape[2], call.softcap)
    scale, softcap = call.scoring.scale, call.softcap
    slopes = call.scoring.slopes_for(query)
    splits = _splits(call, longest)

    def part(start: int, end: int) -> PartialAttention:
        slots = torch.arange(start, end, device=query.device)
        used = slots < pages.totals.unsqueeze(1)  # [B, N]; others may hold NaN
        if pages.leftpad is not None:
            used = used & (slots >= pages.leftpad.unsqueeze(1))
        seen = used.unsqueeze(1).expand(-1, at.shape[1], -1)  # [B, Sq, N]
        if left >= 0:
            seen = seen & (slots >= at.unsqueeze(2) - left)
        if right >= 0:
            seen = seen & (slots <= at.unsqueeze(2) + right)
        if seen.shape[1] == 1:  # hidden tokens may then be read as zeros
            used = seen.squeeze(1)
        key, value = (pages.read(cache, start, end, used) for cache in (call.k_cache, call.v_cache))
        bias = None if slopes is None else _alibi(slopes, slots, at)
        keys = KeySlice(query, key, value, seen, bias, scale, softcap)
        return attend(keys if splits <= 1 else keys.widened())

    if splits <= 1:  # not in the loop, which would make a dynamic length static
        return part(0, longest)
    width = -(-longest // splits)
    whole = part(0, min(width, longest))
    for start in range(width, longest, width):
        whole = merge_online(whole, part(start, min(start + width, longest)))
    return whole


def _splits(call: FlashCall, longest: int) -> int:
    batch, queries, heads, _ = call.q.shape
    return call.num_splits or -(-batch * heads * queries * longest // _SCORES_AT_ONCE)


def _range(start: Tensor, count: int, step: int = 1) -> Tensor:
    """``[B] -> [B, count]``: start, start + step, .."""
    return start.unsqueeze(1) + torch.arange(count, device=start.device) * step
