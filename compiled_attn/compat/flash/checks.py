"""What is wrong with a call by its shapes, dtypes, devices and plain numbers; reads no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_attn.compat.flash.call import FlashCall
from compiled_attn.ops.overlap import expect_apart

__all__ = ["FlashArgumentError", "check_call", "expect", "expect_room"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTS = (torch.int32, torch.int64)
_MAX_HEAD_DIM = 256
_MAX_SPLITS = 128


class FlashArgumentError(RuntimeError, ValueError):
    """A call of `flash_attn_with_kvcache` that cannot be served; the cache is as it was.

    A `RuntimeError` because FlashAttention 2 raises that, and a `ValueError` because that is what
    it is.
    """


def expect(ok: bool, what: str, got: Any, remedy: str) -> None:
    """Raises unless ``ok``."""
    if not ok:
        shown = list(got) if isinstance(got, torch.Size) else got
        raise FlashArgumentError(f"expected {what}, got {shown}: {remedy}")


def expect_tensor(
    call: FlashCall,
    name: str,
    legend: str,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Raises unless an argument has this shape (None: any size), one of the dtypes, q's device."""
    tensor = getattr(call, name)
    if not isinstance(tensor, Tensor):
        got = type(tensor).__name__
        raise TypeError(f"{name}: expected a tensor {legend}, got {got}: convert it to a tensor")
    if tensor.dim() != len(shape) or any(
        size is not None and size != given for size, given in zip(shape, tensor.shape, strict=True)
    ):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        expect(False, f"{name} {legend} of shape [{sizes}]", tensor.shape, "match q and the cache")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        expect(False, f"{name} of dtype {wanted}", got, "convert it with .to()")
    if tensor.device != call.q.device:
        expect(False, f"{name} on {call.q.device} like q", tensor.device, "move it with .to()")


def expect_room(call: FlashCall, longest: int, shortest: int) -> None:
    """Raises unless the row lengths are legal and the new tokens fit behind them."""
    expect(shortest >= 0, "cache_seqlens of at least 0", shortest, "count the tokens in the cache")
    if longest + call.new_tokens > call.capacity:
        limit = "Sc" if call.block_table is None else "W * P (columns of block_table * page size)"
        raise FlashArgumentError(
            f"expected cache_seqlens + Sn of at most {limit} = {call.capacity} tokens, got "
            f"{longest} + {call.new_tokens}: give the row more room before appending"
        )


def check_call(call: FlashCall) -> None:
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
    _check_memory(call)


def _check_query(call: FlashCall) -> None:
    expect_tensor(call, "q", "[B, Sq, H, D]", (None,) * 4, _FLOATS)
    batch, _, _, dim = call.q.shape
    expect(batch > 0, "q with at least one row", call.q.shape, "skip the call for an empty batch")
    expect(0 < dim <= _MAX_HEAD_DIM, "a head dim of 1 to 256", dim, "use smaller heads")


def _check_caches(call: FlashCall) -> None:
    legend, dim, dtype = "[Bc, Sc, Hk, D]", call.q.shape[3], (call.q.dtype,)
    if call.block_table is not None:
        expect_tensor(call, "block_table", "[B, W]", (None, None), _INTS)
        legend = "[NP, P, Hk, D]"
    expect_tensor(call, "k_cache", legend, (None, None, None, dim), dtype)
    expect_tensor(call, "v_cache", legend, call.k_cache.shape, dtype)
    heads, kv_heads = call.q.shape[2], call.k_cache.shape[2]
    divisible = kv_heads > 0 and heads % kv_heads == 0
    expect(divisible, "H divisible by Hk", (heads, kv_heads), "share key heads evenly")
    strides = call.k_cache.stride(), call.v_cache.stride()
    unit = dim == 1 or (strides[0][-1] == 1 and strides[1][-1] == 1)
    expect(unit, "k_cache and v_cache of stride(-1) == 1", strides, "make the head dim contiguous")
    room = call.capacity > 0 and call.k_cache.shape[0] > 0
    expect(room, "a cache with room", call.k_cache.shape, "allocate at least one token a row")


def _check_new_tokens(call: FlashCall) -> None:
    if call.k is None or call.v is None:
        given = [name for name in ("k", "v") if getattr(call, name) is not None]
        expect(not given, "k and v, or neither", f"only {given}", "pass both to append")
        return
    shape = (call.q.shape[0], None, call.k_cache.shape[2], call.q.shape[3])
    expect_tensor(call, "k", "[B, Sn, Hk, D]", shape, (call.q.dtype,))
    expect_tensor(call, "v", "[B, Sn, Hk, D]", call.k.shape, (call.q.dtype,))
    expect(call.cache_seqlens is not None, "cache_seqlens with k", None, "say how long each row is")
    queries = call.q.shape[1]
    fits = queries <= call.capacity
    got = (queries, call.capacity)
    expect(fits, "Sq of at most the cache length with k", got, "pass fewer queries")
    expect_room(call, 0, 0)
    for cache in (call.k_cache, call.v_cache):
        own = all(step or size == 1 for step, size in zip(cache.stride(), cache.shape, strict=True))
        expect(own, "caches without expanded axes", cache.stride(), "clone the cache to write")


def _check_rotary(call: FlashCall) -> None:
    cos, sin = call.rotary_cos, call.rotary_sin
    if cos is None or sin is None:
        expect(cos is sin, "rotary_cos and rotary_sin, or neither", "one of them", "pass both")
        return
    expect(call.k is not None, "k and v with rotary_cos", None, "rotate q with apply_rotary")
    dtype, dim = (call.q.dtype,), call.q.shape[3]
    expect_tensor(call, "rotary_cos", "[R, rd / 2]", (None, None), dtype)
    expect_tensor(call, "rotary_sin", "[R, rd / 2]", cos.shape, dtype)
    rows, rotated = cos.shape[0], 2 * cos.shape[1]
    expect(rotated <= dim, "a rotary dim of at most D", (rotated, dim), "cut the rotary tables")
    expect(rotated % 16 == 0, "a rotary dim divisible by 16", rotated, "cut the rotary tables")
    covers = rows >= call.capacity
    expect(covers, "a rotary row for every cache slot", (rows, call.capacity), "make longer tables")
    contiguous = cos.is_contiguous() and sin.is_contiguous()
    expect(contiguous, "contiguous rotary tables", cos.stride(), "call .contiguous()")


def _check_indices(call: FlashCall) -> None:
    batch, table = call.q.shape[0], call.block_table
    names = ["cache_batch_idx", "cache_leftpad"]
    if _is_int(call.cache_seqlens):
        expect_room(call, call.cache_seqlens, call.cache_seqlens)  # type: ignore[arg-type]
    else:
        names.append("cache_seqlens")
    for name in names:
        vector = getattr(call, name)
        if vector is None:
            continue
        expect_tensor(call, name, "[B]", (batch,), _INTS)
        dense = vector.is_contiguous()
        expect(dense, f"contiguous {name}", vector.stride(), "call .contiguous()")
    if table is not None:
        dense = table.stride(1) == 1 or table.shape[1] == 1
        expect(dense, "block_table of stride(-1) == 1", table.stride(), "call .contiguous()")
    if call.cache_batch_idx is not None:
        return
    name, rows = (
        ("k_cache", call.k_cache.shape[0]) if table is None else ("block_table", len(table))
    )
    enough = rows >= batch if table is None else rows == batch
    expect(enough, f"a row of {name} for each of q", (rows, batch), "pass cache_batch_idx")


def _check_memory(call: FlashCall) -> None:
    """What is written must be nothing that is read after it, least of all as an index."""
    if call.k is None:
        return
    indices = "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"
    read = {name: getattr(call, name) for name in ("k", "v", *indices)}
    written = {"k_cache": call.k_cache, "v_cache": call.v_cache}
    expect_apart(written, read, FlashArgumentError)


def _check_options(call: FlashCall) -> None:
    slopes = call.alibi_slopes
    if slopes is not None:
        by_row = isinstance(slopes, Tensor) and slopes.dim() == 2
        shape = (call.q.shape[0], call.q.shape[2]) if by_row else (call.q.shape[2],)
        expect_tensor(call, "alibi_slopes", "[H] or [B, H]", shape, (torch.float32,))
    numbers: dict[str, object] = {"softmax_scale": call.scale, "softcap": call.softcap}
    for name, number in numbers.items():
        if not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
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
