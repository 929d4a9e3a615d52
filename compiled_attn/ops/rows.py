"""The op ``write_rows``: new tokens into a cache in place, in compiled graphs without a copy of it.

`index_put_` is enough where the cache is a tensor of its own. Of a view the compiler makes a
functional update of its base, which copies what is written to and scatters it back, cache-sized:
for a view taken inside of the graph, and for two inputs whose elements interleave (halves of a
fused kv buffer). The op declares what it mutates, and is handed the view as it is. Both cases are
shown in tests/graph_breaks/test_flash.py.
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
        cache: blocks are its first axis, of any rank and strides.
        block, slot: ints ``[...]``, in range.
        rows: ``[..., *]``, a cell's elements last.
        slot_axis: axis of the slots in a block; 0: ``block`` alone is the slot, of a flat cache.
    """
    if torch.compiler.is_compiling() and not stands_alone(cache):
        torch.ops.compiled_attn.write_rows(cache, block, slot, rows, slot_axis)
    else:
        _put(cache, block, slot, rows, slot_axis)


def cells(block: Tensor, slot: Tensor, slot_axis: int) -> tuple[Tensor | slice, ...]:
    """What indexes the cells of a cache, arguments as in `write_rows`."""
    return (block, *[slice(None)] * (slot_axis - 1), slot) if slot_axis else (block,)


def stands_alone(cache: Tensor) -> bool:
    """Whether the cache is not a view, nor has gaps in which another tensor may have its elements.

    For any other cache a compiler turns a write into a copy of what is written to.
    """
    if cache.is_contiguous():
        return cache._base is None
    # `index` makes a size that the compiler keeps open a constant of the graph: what torch 2.13
    # makes of writes to interleaved inputs of open sizes is wrong.
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
