"""Validates the arguments of a call: shapes, dtypes, devices, numbers, then index tensors.

In eager mode index tensors are read, and errors name the number. A compiled or captured graph must
not read the device; there the same conditions are assertions inside the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_attn.arguments import FLOATS, INTS, Expect, slot_used_twice
from compiled_attn.compat.flash.inputs import FlashCall
from compiled_attn.errors import FlashArgumentError

__all__ = ["assert_bounds", "check", "check_bounds"]

expect = Expect(FlashArgumentError, FlashArgumentError, remedy="match q and the cache")

_MAX_HEAD_DIM = 256
_MAX_SPLITS = 128


def check(call: FlashCall) -> None:
    """Checks everything that does not need to read a tensor.

    Raises:
        FlashArgumentError: a shape, dtype, device, stride or number is wrong.
        TypeError: an argument is not a tensor.
    """
    _check_query(call)
    _check_caches(call)
    _check_new_tokens(call)
    _check_rotary(call)
    _check_indices(call)
    _check_options(call)
    if call.k is not None:  # written before these are read
        indices = "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"
        read = {name: getattr(call, name) for name in ("k", "v", *indices)}
        expect.apart({"k_cache": call.k_cache, "v_cache": call.v_cache}, read)


def _expect_room(call: FlashCall, longest: int, shortest: int) -> None:
    expect(shortest >= 0, "cache_seqlens of at least 0", shortest, "pass tokens in the cache")
    if longest + call.new_tokens > call.capacity:
        limit = "Sc" if call.block_table is None else "W * P (columns of block_table * page size)"
        expected = f"cache_seqlens + Sn of at most {limit} = {call.capacity} tokens"
        got = f"{longest} + {call.new_tokens}"
        expect(False, expected, got, "give the row more room before appending")


def _tensor(
    call: FlashCall,
    name: str,
    legend: str,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
) -> None:
    expect.tensor(name, getattr(call, name), legend, shape, dtypes, call.q)


def _check_query(call: FlashCall) -> None:
    expect.tensor("q", call.q, "[B, Sq, H, D]", (None,) * 4, FLOATS)
    batch, _, _, dim = call.q.shape
    expect(batch > 0, "q with at least one row", call.q.shape, "skip the call for an empty batch")
    expect(0 < dim <= _MAX_HEAD_DIM, "a head dim of 1 to 256", dim, "use smaller heads")


def _check_caches(call: FlashCall) -> None:
    legend, dim, dtype = "[Bc, Sc, Hk, D]", call.q.shape[3], (call.q.dtype,)
    if call.block_table is not None:
        _tensor(call, "block_table", "[B, W]", (None, None), INTS)
        legend = "[NP, P, Hk, D]"
    _tensor(call, "k_cache", legend, (None, None, None, dim), dtype)
    _tensor(call, "v_cache", legend, call.k_cache.shape, dtype)
    expect.heads(call.q.shape[2], call.k_cache.shape[2])
    expect.unit_stride(k_cache=call.k_cache, v_cache=call.v_cache)
    room = call.capacity > 0 and call.k_cache.shape[0] > 0
    expect(room, "a cache with room", call.k_cache.shape, "allocate at least one token a row")


def _check_new_tokens(call: FlashCall) -> None:
    if call.k is None or call.v is None:
        given = [name for name in ("k", "v") if getattr(call, name) is not None]
        expect(not given, "k and v, or neither", f"only {given}", "pass both to append")
        return
    shape = (call.q.shape[0], None, call.k_cache.shape[2], call.q.shape[3])
    _tensor(call, "k", "[B, Sn, Hk, D]", shape, (call.q.dtype,))
    _tensor(call, "v", "[B, Sn, Hk, D]", call.k.shape, (call.q.dtype,))
    expect(call.cache_seqlens is not None, "cache_seqlens with k", None, "pass row lengths")
    sizes = queries, room = call.q.shape[1], call.capacity
    expect(queries <= room, "Sq of at most the cache length with k", sizes, "pass fewer queries")
    _expect_room(call, 0, 0)
    expect.not_expanded(call.k_cache, call.v_cache)


def _check_rotary(call: FlashCall) -> None:
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos is None or sin is None:
        expect(cos is sin, "rotary_cos and rotary_sin, or neither", "one of them", "pass both")
        return
    expect(call.k is not None, "k and v with rotary_cos", None, "rotate q with apply_rotary")
    dtype, dim = (call.q.dtype,), call.q.shape[3]
    _tensor(call, "rotary_cos", "[R, rd / 2]", (None, None), dtype)
    _tensor(call, "rotary_sin", "[R, rd / 2]", cos.shape, dtype)
    rows, rotated = cos.shape[0], 2 * cos.shape[1]
    expect(rotated <= dim, "a rotary dim of at most D", (rotated, dim), "cut the rotary tables")
    expect(rotated % 16 == 0, "a rotary dim divisible by 16", rotated, "cut the rotary tables")
    covers = rows >= call.capacity
    expect(covers, "a rotary row for every cache slot", (rows, call.capacity), "make longer tables")
    expect.contiguous(rotary_cos=cos, rotary_sin=sin)


def _check_indices(call: FlashCall) -> None:
    batch, table = call.q.shape[0], call.block_table
    names = ["cache_batch_idx", "cache_leftpad"]
    if _is_int(call.cache_seqlens):
        _expect_room(call, call.cache_seqlens, call.cache_seqlens)  # type: ignore[arg-type]
    else:
        names.append("cache_seqlens")
    for name in names:
        vector = getattr(call, name)
        if vector is not None:
            _tensor(call, name, "[B]", (batch,), INTS)
            expect.contiguous(**{name: vector})
    if table is not None:
        expect.unit_stride(block_table=table)
    if call.cache_batch_idx is None:
        rows, remedy = _rows(call), "pass cache_batch_idx"
        name, fits = ("k_cache", rows >= batch) if table is None else ("block_table", rows == batch)
        expect(fits, f"a row of {name} for each of q", (rows, batch), remedy)


def _check_options(call: FlashCall) -> None:
    slopes = call.alibi_slopes
    if slopes is not None:
        by_row = isinstance(slopes, Tensor) and slopes.dim() == 2
        shape = (call.q.shape[0], call.q.shape[2]) if by_row else (call.q.shape[2],)
        _tensor(call, "alibi_slopes", "[H] or [B, H]", shape, (torch.float32,))
    if call.softmax_scale is not None:
        expect.number("softmax_scale", call.softmax_scale)
    expect.number("softcap", call.softcap, "0.0 is no softcap")
    sides = call.window_size
    is_pair = isinstance(sides, (tuple, list)) and len(sides) == 2 and all(map(_is_int, sides))
    expect(is_pair, "window_size as two ints (left, right)", sides, "use -1 for an open side")
    splits = call.num_splits
    legal = _is_int(splits) and 0 <= splits <= _MAX_SPLITS
    expect(legal, "num_splits of 0 to 128", splits, "use 0 to leave it to the heuristic")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_bounds(call: FlashCall, lengths: Tensor) -> int:
    """Checks lengths, pads, rows and pages; returns the length of the longest row with new tokens.

    Raises:
        FlashArgumentError: a number is out of range, or two new tokens would get one slot.
    """
    cached: list[int] = lengths.tolist()
    longest = max(cached)
    _expect_room(call, longest, min(cached))
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
    """Checks the same without reading: a graph with bad numbers fails before it writes."""
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
    return call.q.shape[1] if call.rotates_by_position else 1


def _rows(call: FlashCall) -> int:
    return (call.k_cache if call.block_table is None else call.block_table).shape[0]


def _tables(call: FlashCall, block_table: Tensor) -> Tensor:
    return block_table if call.cache_batch_idx is None else block_table[call.cache_batch_idx]


def _bad_pages(call: FlashCall, lengths: Tensor, table: Tensor) -> Tensor:
    """Entries ``[B, W]`` that a row uses but that are not pages."""
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
        expected = f"block_table[{row}, {column}] in 0 .. {call.k_cache.shape[0] - 1}"
        remedy = "the row uses this entry, so give it a page of the cache"
        expect(False, expected, int(table[row, column]), remedy)
    if call.new_tokens:
        _check_overlap(call, lengths, table)


def _check_overlap(call: FlashCall, lengths: Tensor, table: Tensor) -> None:
    # All padded rows of a batch write to the same slots of page 0.
    positions = lengths.long().unsqueeze(1) + torch.arange(call.new_tokens, device=table.device)
    pages = table.long().gather(1, positions // call.page_size)
    slots = pages * call.page_size + positions % call.page_size
    twice = slot_used_twice(slots[pages != 0])
    if twice is not None:
        page, slot = divmod(twice, call.page_size)
        remedy = "let no two rows of block_table append to one page"
        got = f"page {page} slot {slot} twice"
        expect(False, "every new token in a slot of its own", got, remedy)
