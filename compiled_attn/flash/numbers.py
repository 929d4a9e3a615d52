"""What the numbers in the index tensors of a call say is wrong with it; this reads the device."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.flash.call import FlashCall
from compiled_attn.flash.checks import FlashArgumentError, expect, expect_room

__all__ = ["can_read", "check_numbers"]


def can_read(tensor: Tensor) -> bool:
    """Whether numbers may be read now: not while compiling or capturing, nor from a meta tensor."""
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_numbers(call: FlashCall, lengths: Tensor) -> int:
    """Checks lengths, pads, rows and pages; returns the tokens of the longest row, with the new.

    Raises:
        FlashArgumentError: a number is out of range, or two new tokens would get one slot.
    """
    cached: list[int] = lengths.tolist()
    longest = max(cached)
    expect_room(call, longest, min(cached))
    if call.rotary_cos is not None:
        last = longest + (call.q.shape[1] if call.queries_turn else 1)
        rows = call.rotary_cos.shape[0]
        fits = last <= rows
        expect(fits, "a rotary row for every query", (last, rows), "make longer rotary tables")
    if call.cache_leftpad is not None:
        for pad, length in zip(call.cache_leftpad.tolist(), cached, strict=True):
            within = 0 <= pad <= length + call.new_tokens
            expect(within, "cache_leftpad within the row", (pad, length), "pad at most its tokens")
    if call.cache_batch_idx is not None:
        rows = (call.k_cache if call.block_table is None else call.block_table).shape[0]
        chosen = call.cache_batch_idx.tolist()
        legal = min(chosen) >= 0 and max(chosen) < rows
        expect(legal, f"cache_batch_idx in 0 .. {rows - 1}", chosen, "name rows that exist")
    if call.block_table is not None:
        rows_of = slice(None) if call.cache_batch_idx is None else call.cache_batch_idx
        _check_pages(call, lengths, call.block_table[rows_of])
    return longest + call.new_tokens


def _check_pages(call: FlashCall, lengths: Tensor, table: Tensor) -> None:
    pages, size = call.k_cache.shape[:2]
    pad = torch.zeros_like(lengths) if call.cache_leftpad is None else call.cache_leftpad
    first = torch.minimum(lengths, pad)
    starts = torch.arange(table.shape[1], device=table.device) * size
    used = (starts + size > first.unsqueeze(1)) & (starts < lengths.unsqueeze(1) + call.new_tokens)
    bad = used & ((table < 0) | (table >= pages))
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise FlashArgumentError(
            f"expected block_table[{row}, {column}] in 0 .. {pages - 1}, got "
            f"{int(table[row, column])}: the row uses this entry, so give it a page of the cache"
        )
    if call.new_tokens:
        _check_overlap(call, lengths, table)


def _check_overlap(call: FlashCall, lengths: Tensor, table: Tensor) -> None:
    # Page 0 is where padded rows of a batch write, all of them to the same slots.
    positions = lengths.long().unsqueeze(1) + torch.arange(call.new_tokens, device=table.device)
    columns = positions // call.page_size
    pages = table.long().gather(1, columns)
    slots = pages * call.page_size + positions % call.page_size
    slots, counts = slots[pages != 0].unique(return_counts=True)
    if (counts > 1).any():
        page, slot = divmod(int(slots[counts > 1][0]), call.page_size)
        raise FlashArgumentError(
            f"expected every new token in a slot of its own, got page {page} slot {slot} twice: "
            "let no two rows of block_table append to one page"
        )
