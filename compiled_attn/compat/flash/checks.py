"""Checks of a call by its shapes, dtypes, devices and plain numbers; reads no tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_attn.arguments import FLOATS, INTS, Expect, is_number
from compiled_attn.compat.flash.call import FlashCall
from compiled_attn.errors import FlashArgumentError

__all__ = ["check", "expect", "expect_room"]

expect = Expect(FlashArgumentError, FlashArgumentError, remedy="match q and the cache")

_MAX_HEAD_DIM = 256
_MAX_SPLITS = 128


def check(call: FlashCall) -> None:
    """Checks all that can be known without reading a tensor.

    Raises:
        FlashArgumentError: a shape, dtype, device, stride or number does not fit.
        TypeError: an argument is no tensor where one is needed.
    """
    _check_query(call)
    _check_caches(call)
    _check_new_tokens(call)
    _check_rotary(call)
    _check_indices(call)
    _check_options(call)
    if call.k is not None:  # what is written must be nothing that is read after it
        indices = "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"
        read = {name: getattr(call, name) for name in ("k", "v", *indices)}
        expect.apart({"k_cache": call.k_cache, "v_cache": call.v_cache}, read)


def expect_room(call: FlashCall, longest: int, shortest: int) -> None:
    """Raises unless the row lengths are legal and the new tokens fit behind them."""
    expect(shortest >= 0, "cache_seqlens of at least 0", shortest, "count the tokens in the cache")
    if longest + call.new_tokens > call.capacity:
        limit = "Sc" if call.block_table is None else "W * P (columns of block_table * page size)"
        wanted = f"cache_seqlens + Sn of at most {limit} = {call.capacity} tokens"
        got = f"{longest} + {call.new_tokens}"
        expect(False, wanted, got, "give the row more room before appending")


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
        if given:
            expect(False, "k and v, or neither", f"only {given}", "pass both to append")
        return
    shape = (call.q.shape[0], None, call.k_cache.shape[2], call.q.shape[3])
    _tensor(call, "k", "[B, Sn, Hk, D]", shape, (call.q.dtype,))
    _tensor(call, "v", "[B, Sn, Hk, D]", call.k.shape, (call.q.dtype,))
    expect(call.cache_seqlens is not None, "cache_seqlens with k", None, "say how long each row is")
    sizes = call.q.shape[1], call.capacity
    expect(
        sizes[0] <= sizes[1],
        "Sq of at most the cache length with k",
        sizes,
        "pass fewer queries",
    )
    expect_room(call, 0, 0)
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
        expect_room(call, call.cache_seqlens, call.cache_seqlens)  # type: ignore[arg-type]
    else:
        names.append("cache_seqlens")
    for name in names:
        vector = getattr(call, name)
        if vector is not None:
            _tensor(call, name, "[B]", (batch,), INTS)
            expect.contiguous(**{name: vector})
    if table is not None:
        expect.unit_stride(block_table=table)
    if call.cache_batch_idx is not None:
        return
    if table is None:
        rows = call.k_cache.shape[0]
        remedy = "pass cache_batch_idx"
        expect(rows >= batch, "a row of k_cache for each of q", (rows, batch), remedy)
    else:
        rows = len(table)
        remedy = "pass cache_batch_idx"
        expect(rows == batch, "a row of block_table for each of q", (rows, batch), remedy)


def _check_options(call: FlashCall) -> None:
    slopes = call.alibi_slopes
    if slopes is not None:
        by_row = isinstance(slopes, Tensor) and slopes.dim() == 2
        shape = (call.q.shape[0], call.q.shape[2]) if by_row else (call.q.shape[2],)
        _tensor(call, "alibi_slopes", "[H] or [B, H]", shape, (torch.float32,))
    for name, number in (("softmax_scale", call.softmax_scale), ("softcap", call.softcap)):
        if number is not None and not is_number(number):
            got = type(number).__name__
            raise TypeError(f"{name}: expected a number, got {got}: pass a float")
    sides = call.window_size
    is_pair = isinstance(sides, (tuple, list)) and len(sides) == 2 and all(map(_is_int, sides))
    expect(is_pair, "window_size as two ints (left, right)", sides, "use -1 for an open side")
    splits = call.num_splits
    legal = _is_int(splits) and 0 <= splits <= _MAX_SPLITS
    expect(legal, "num_splits of 0 to 128", splits, "use 0 to leave it to the heuristic")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
