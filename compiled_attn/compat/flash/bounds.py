"""Bounds of the numbers in the index tensors of a call.

In eager mode they are read and errors say which number it is. A compiled or captured graph must not
read the device; there the same conditions are assertions inside of the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.arguments import slot_used_twice
from compiled_attn.compat.flash.call import FlashCall
from compiled_attn.compat.flash.checks import expect, expect_room

__all__ = ["assert_bounds", "check_bounds"]


def check_bounds(call: FlashCall, lengths: Tensor) -> int:
    """Checks lengths, pads, rows and pages; returns the tokens of the longest row, with the new.

    Raises:
        FlashArgumentError: a number is out of range, or two new tokens would get one slot.
    """
    cached: list[int] = lengths.tolist()
    longest = max(cached)
    expect_room(call, longest, min(cached))
    if call.rotary_cos is not None:
        last, rows = longest + _rotary_rows(call), call.rotary_cos.shape[0]
        fits = last <= rows
        expect(fits, "a rotary row for every query", (last, rows), "make longer rotary tables")
    if call.cache_leftpad is not None:
        for pad, length in zip(call.cache_leftpad.tolist(), cached, strict=True):
            within = 0 <= pad <= length + call.new_tokens
            expect(within, "cache_leftpad within the row", (pad, length), "pad at most its tokens")
    if call.cache_batch_idx is not None:
        rows, chosen = _rows(call), call.cache_batch_idx.tolist()
        legal = min(chosen) >= 0 and max(chosen) < rows
        expect(legal, f"cache_batch_idx in 0 .. {rows - 1}", chosen, "name rows that exist")
    if call.block_table is not None:
        _check_pages(call, lengths, _tables(call, call.block_table))
    return longest + call.new_tokens


def assert_bounds(call: FlashCall, lengths: Tensor) -> None:
    """The same without reading: a graph that runs on bad numbers fails before it writes."""
    most = call.capacity - call.new_tokens
    if call.rotary_cos is not None:
        most = min(most, call.rotary_cos.shape[0] - _rotary_rows(call))
    fits = (lengths >= 0) & (lengths <= most)
    torch._assert_async(
        fits.all(), "expected cache_seqlens + Sn within the cache (Sc, or W * P of block_table)"
    )
    if call.cache_batch_idx is not None:
        legal = (call.cache_batch_idx >= 0) & (call.cache_batch_idx < _rows(call))
        torch._assert_async(legal.all(), "expected cache_batch_idx within the rows of the cache")
    if call.block_table is not None:
        bad = _bad_pages(call, lengths, _tables(call, call.block_table))
        torch._assert_async(~bad.any(), "expected used entries of block_table to be pages")


def _rotary_rows(call: FlashCall) -> int:
    """Rotary rows from a row's length on that its queries need."""
    return call.q.shape[1] if call.queries_turn else 1


def _rows(call: FlashCall) -> int:
    """Rows that cache_batch_idx chooses from."""
    return (call.k_cache if call.block_table is None else call.block_table).shape[0]


def _tables(call: FlashCall, block_table: Tensor) -> Tensor:
    """The row of the block table of each batch row, ``[B, W]``."""
    return block_table if call.cache_batch_idx is None else block_table[call.cache_batch_idx]


def _bad_pages(call: FlashCall, lengths: Tensor, table: Tensor) -> Tensor:
    """Which entries ``[B, W]`` a row uses though there is no such page."""
    pages, size = call.k_cache.shape[:2]
    pad = torch.zeros_like(lengths) if call.cache_leftpad is None else call.cache_leftpad
    first = torch.minimum(lengths, pad).unsqueeze(1)
    starts = torch.arange(table.shape[1], device=table.device) * size
    used = (starts + size > first) & (starts < lengths.unsqueeze(1) + call.new_tokens)
    return used & ((table < 0) | (table >= pages))


def _check_pages(call: FlashCall, lengths: Tensor, table: Tensor) -> None:
    bad = _bad_pages(call, lengths, table)
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        wanted = f"block_table[{row}, {column}] in 0 .. {call.k_cache.shape[0] - 1}"
        remedy = "the row uses this entry, so give it a page of the cache"
        expect(False, wanted, int(table[row, column]), remedy)
    if call.new_tokens:
        _check_overlap(call, lengths, table)


def _check_overlap(call: FlashCall, lengths: Tensor, table: Tensor) -> None:
    # Page 0 is where padded rows of a batch write, all of them to the same slots.
    positions = lengths.long().unsqueeze(1) + torch.arange(call.new_tokens, device=table.device)
    pages = table.long().gather(1, positions // call.page_size)
    slots = pages * call.page_size + positions % call.page_size
    twice = slot_used_twice(slots[pages != 0])
    if twice is not None:
        page, slot = divmod(twice, call.page_size)
        remedy = "let no two rows of block_table append to one page"
        got = f"page {page} slot {slot} twice"
        expect(False, "every new token in a slot of its own", got, remedy)
