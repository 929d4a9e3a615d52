"""Memory layouts of a paged cache, and exact conversions between them.

Every conversion goes through NHD and returns a view if strides can express it, else copies once.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from compiled_attn.arguments import Expect
from compiled_attn.errors import PagedArgumentError

__all__ = [
    "LAYOUTS", "Layout", "axes", "convert_key", "convert_value", "empty_caches", "expect",
    "key_shape", "packing", "take_blocks", "value_shape",
]  # fmt: skip

Layout = Literal["packed", "flat", "NHD", "HND"]
"""Name of a layout: NB blocks of BS tokens, Hk heads, D elements, ``x = 16 // element size``.

====== ==================== ==================
name   key cache            value cache
====== ==================== ==================
packed (NB, Hk, D/x, BS, x) (NB, Hk, D, BS)
flat   (NB * BS, Hk, D)     (NB * BS, Hk, D)
NHD    (NB, BS, Hk, D)      (NB, BS, Hk, D)
HND    (NB, Hk, BS, D)      (NB, Hk, BS, D)
====== ==================== ==================
"""

expect = Expect(PagedArgumentError, PagedArgumentError)

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def packing(dtype: torch.dtype) -> int:
    """The x of the packed layout: elements in 16 bytes (2, 4, 8 or 16)."""
    return 16 // dtype.itemsize


def axes(layout: Layout, *, is_key: bool) -> int:
    """Returns the rank of a key or value cache; `PagedArgumentError` for an unknown layout."""
    expect(layout in LAYOUTS, f"a layout of {LAYOUTS}", layout, "choose one of these")
    return 3 if layout == "flat" else 5 if layout == "packed" and is_key else 4


def key_shape(
    layout: Layout,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[int, ...]:
    """Returns the shape of a key cache.

    Raises:
        PagedArgumentError: unknown layout, or ``head_dim`` is not a multiple of x in the packed
            layout.
    """
    if layout != "packed":
        return value_shape(layout, num_blocks, block_size, num_kv_heads, head_dim)
    x = packing(dtype)
    expected = f"a head dim divisible by x = {x} for {dtype}"
    expect(head_dim % x == 0, expected, head_dim, "use layout NHD or HND")
    return (num_blocks, num_kv_heads, head_dim // x, block_size, x)


def value_shape(
    layout: Layout, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """Returns the shape of a value cache; `PagedArgumentError` for an unknown layout."""
    axes(layout, is_key=False)
    shapes: dict[Layout, tuple[int, ...]] = {
        "packed": (num_blocks, num_kv_heads, head_dim, block_size),
        "flat": (num_blocks * block_size, num_kv_heads, head_dim),
        "NHD": (num_blocks, block_size, num_kv_heads, head_dim),
        "HND": (num_blocks, num_kv_heads, block_size, head_dim),
    }
    return shapes[layout]


def empty_caches(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    layout: Layout = "packed",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns an uninitialised key and value cache: attention never reads unwritten slots.

    Raises:
        PagedArgumentError: a size is below 1, or as `key_shape`.
    """
    sizes = (num_blocks, block_size, num_kv_heads, head_dim)
    expected = "num_blocks, block_size, num_kv_heads, head_dim of at least 1"
    expect(min(sizes) >= 1, expected, sizes, "choose larger")
    key = torch.empty(key_shape(layout, *sizes, dtype), dtype=dtype, device=device)
    return key, torch.empty(value_shape(layout, *sizes), dtype=dtype, device=device)


def convert_key(
    cache: Tensor, source: Layout, target: Layout, *, block_size: int | None = None
) -> Tensor:
    """Converts keys to another layout, bit for bit.

    Between flat, NHD and HND, and from any of these to packed, the result is a view (HND and packed
    ones with permuted strides; ``.contiguous()`` makes them dense). From packed to the others it is
    a copy, unless the block size or ``D/x`` is 1; from HND to flat it is a copy, unless the block
    size or the number of heads is 1.

    Args:
        cache: key cache in layout ``source``.
        source, target: see `Layout`.
        block_size: tokens in a block; only needed from flat to another layout.

    Raises:
        PagedArgumentError: the cache does not have the source layout, or cannot have the target
            layout.
    """
    return _convert(cache, source, target, block_size, is_key=True)


def convert_value(
    cache: Tensor, source: Layout, target: Layout, *, block_size: int | None = None
) -> Tensor:
    """Converts values to another layout, bit for bit.

    A view, except to flat from HND and packed (whose tokens are not adjacent), unless the block
    size or the number of heads is 1. Arguments and errors as in `convert_key`.
    """
    return _convert(cache, source, target, block_size, is_key=False)


def take_blocks(
    cache: Tensor, blocks: Tensor, layout: Layout, block_size: int, *, is_key: bool
) -> Tensor:
    """Copies blocks of a cache as NHD: ids ``[B] -> [B, BS, Hk, D]``."""
    if layout == "flat":
        by_block: Tensor = cache.unflatten(0, (-1, block_size))
        return by_block[blocks]
    return (convert_key if is_key else convert_value)(cache[blocks], layout, "NHD")


def _convert(
    cache: Tensor, source: Layout, target: Layout, block_size: int | None, *, is_key: bool
) -> Tensor:
    _check_source(cache, source, block_size, is_key=is_key)
    if source == "HND":
        cache = cache.transpose(1, 2)
    elif source == "flat":
        cache = cache.unflatten(0, (-1, block_size or 1))
    elif source == "packed":
        cache = cache.permute(0, 3, 1, 2, 4).flatten(-2) if is_key else cache.permute(0, 3, 1, 2)
    axes(target, is_key=is_key)
    if is_key:
        blocks, size, heads, dim = cache.shape
        key_shape(target, blocks, size, heads, dim, cache.dtype)
    if target == "NHD":
        return cache
    if target == "HND":
        return cache.transpose(1, 2)
    if target == "flat":
        return cache.flatten(0, 1)
    if is_key:
        split: Tensor = cache.unflatten(-1, (-1, packing(cache.dtype)))
        return split.permute(0, 2, 3, 1, 4)
    return cache.permute(0, 2, 3, 1)


def _check_source(cache: Tensor, layout: Layout, block_size: int | None, *, is_key: bool) -> None:
    rank = axes(layout, is_key=is_key)
    expected = f"a {layout} cache with {rank} axes"
    expect(cache.dim() == rank, expected, cache.shape, "pass its layout")
    if rank == 5:
        x = packing(cache.dtype)
        expected = f"a last axis of x = {x} for {cache.dtype}"
        expect(cache.shape[-1] == x, expected, cache.shape, "check dtype and layout")
    if layout == "flat":
        size = block_size or 0
        expect(size >= 1, "block_size of a flat cache", block_size, "pass block_size")
        expected, slots = f"slots to be a multiple of block_size {size}", cache.shape[0]
        expect(slots % size == 0, expected, slots, "pass the block size of the cache")
