"""The op ``write_rows``: writes tokens to a cache in place, without a copy in compiled graphs.

`index_put_` suffices for a cache that owns its memory. For a view (taken inside the graph, or one
of two inputs that interleave, like a fused kv buffer) the compiler functionalises the update of its
base, which copies the whole cache. The op declares its mutation and receives the view as it is. See
tests/graph_breaks/test_flash.py.
"""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

__all__ = ["cells", "stands_alone", "write_rows"]

_LIBRARY = torch.library.Library("compiled_attn", "FRAGMENT")
_LIBRARY.define(
    "write_rows(Tensor(a!) cache, Tensor block, Tensor slot, Tensor rows, int slot_axis) -> ()"
)


def write_rows(
    cache: Tensor, block: Tensor, slot: Tensor, rows: Tensor, slot_axis: int = 1
) -> None:
    """Writes rows to their cells of a cache, in place.

    Args:
        cache: blocks first, any rank and strides.
        block, slot: ints ``[...]``, in range.
        rows: ``[..., *]``, elements of a cell last.
        slot_axis: axis of slots in a block; 0: the cache is flat and ``block`` is the slot.
    """
    if torch.compiler.is_compiling() and not stands_alone(cache):
        torch.ops.compiled_attn.write_rows(cache, block, slot, rows, slot_axis)
    else:
        _put(cache, block, slot, rows, slot_axis)


def cells(block: Tensor, slot: Tensor, slot_axis: int) -> tuple[Tensor | slice, ...]:
    """Returns the index of cells of a cache; arguments as in `write_rows`."""
    return (block, *[slice(None)] * (slot_axis - 1), slot) if slot_axis else (block,)


def stands_alone(cache: Tensor) -> bool:
    """Whether the cache is no view and has no gaps that another tensor's elements may fill.

    Otherwise a compiler turns writes into copies of the cache.
    """
    if cache.is_contiguous():
        return cache._base is None
    # `index` specialises dynamic sizes: torch 2.13 miscompiles writes to interleaved inputs of
    # dynamic sizes.
    strides, sizes = [index(n) for n in cache.stride()], [index(n) for n in cache.shape]
    if cache._base is not None:
        return False
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _put(cache: Tensor, block: Tensor, slot: Tensor, rows: Tensor, slot_axis: int) -> None:
    cache[cells(block, slot, slot_axis)] = rows


def _fake(*_: Tensor | int) -> None:
    return None


_LIBRARY.impl("write_rows", _put, "CompositeExplicitAutograd")
torch.library.register_fake("compiled_attn::write_rows", _fake, lib=_LIBRARY)
