"""The memory of a cache viewed as rows of integers, one row per block, for any dtype and layout.

Copying integers is exact for every dtype (NaN payloads, float8), uses the widest words that fit,
and needs no kernel of that dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.utils.dlpack
from torch import Tensor

from compiled_attn.arguments import whole
from compiled_attn.cache.kv_cache import PagedKVCache

__all__ = ["CacheMemory", "alias"]

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class CacheMemory:
    """The memory of all tensors of a cache."""

    def __init__(self, buffers: PagedKVCache | Sequence[Tensor], num_blocks: int | None) -> None:
        self._tensors = _source_of(buffers)
        tensors = self._tensors()
        self.device = _common_device(tensors)
        self.num_blocks = _num_blocks(buffers, tensors[0], num_blocks)
        self._extents = [extent_of(tensor, self.num_blocks) for tensor in tensors]
        check_disjoint(self._extents)
        self.addresses = [extent.address for extent in self._extents]
        self.bytes_per_block = sum(extent.size for extent in self._extents)

    def rows(self) -> list[Tensor]:
        """Each tensor as rows of integers ``[num_blocks, words]``."""
        pairs = zip(self._tensors(), self._extents, strict=True)
        return [block_rows(tensor, extent) for tensor, extent in pairs]

    def has_moved(self) -> bool:
        """Whether the tensors were moved, cast or replaced since this was created."""
        return [tensor.data_ptr() for tensor in self._tensors()] != self.addresses


@dataclass(frozen=True)
class Extent:
    """Block ``b`` of a tensor is the bytes ``address + b * stride + [0, size)``."""

    address: int
    num_blocks: int
    stride: int
    size: int

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.address + (self.num_blocks - 1) * self.stride + self.size

    def overlaps(self, other: Extent) -> bool:
        """Whether a byte belongs to both, or (if strides differ) may do so."""
        if self.end <= other.address or other.end <= self.address:
            return False
        if self.stride != other.stride:
            return True
        ahead = (other.address - self.address) % self.stride
        return ahead < self.size or ahead + other.size > self.stride


def extent_of(tensor: Tensor, num_blocks: int) -> Extent:
    """Returns the extent of a tensor whose first axis is blocks, or flat slots of all blocks."""
    slots = tensor.shape[0] if tensor.dim() else 0
    if not tensor.numel() or slots % num_blocks:
        raise ValueError(
            f"expected axis 0 to be {num_blocks} blocks or a multiple in slots, got a cache of "
            f"shape {list(tensor.shape)}: check num_blocks"
        )
    stride = slots // num_blocks * tensor.stride(0)
    inside = [(tensor.stride(0), slots // num_blocks)]
    inside += zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
    size = 1
    for step, length in sorted(pair for pair in inside if pair[1] > 1):
        if step != size:
            break
        size *= length
    if size * num_blocks != tensor.numel() or (num_blocks > 1 and stride < size):
        raise ValueError(
            f"expected every block to be contiguous, got shape {list(tensor.shape)} with "
            f"strides {list(tensor.stride())}: keep blocks on axis 0 of a dense tensor"
        )
    item = tensor.element_size()
    return Extent(tensor.data_ptr(), num_blocks, stride * item, size * item)


def check_disjoint(extents: Sequence[Extent]) -> None:
    """Raises ``ValueError`` if two caches share memory: it would be exchanged twice."""
    for number, extent in enumerate(extents):
        for earlier, other in enumerate(extents[:number]):
            if extent.overlaps(other):
                raise ValueError(
                    f"expected caches with memory of their own, got {earlier} and {number}, which "
                    "share some: pass each once, or the tensor that holds both"
                )


def block_rows(tensor: Tensor, extent: Extent) -> Tensor:
    """Views the memory as integers ``[num_blocks, size // width]``, of the widest dtype that fits.

    Autograd and compilers don't know that it is a view: a compiled graph that writes to a known
    view copies its base.
    """
    numbers = (extent.address, extent.stride, extent.size)
    word = next(dtype for dtype in _WORDS if not any(n % dtype.itemsize for n in numbers))
    width = word.itemsize
    offset = extent.address - tensor.untyped_storage().data_ptr()
    if offset % width:
        word, width = torch.uint8, 1
    rows = torch.empty(0, dtype=word, device=tensor.device)
    shape = (extent.num_blocks, extent.size // width)
    rows.set_(tensor.untyped_storage(), offset // width, shape, (extent.stride // width, 1))
    return alias(rows)


def alias(rows: Tensor) -> Tensor:
    """Returns a tensor over the same memory that compilers take for another one, if possible."""
    try:
        other: Tensor = torch.utils.dlpack.from_dlpack(rows)
    except (BufferError, RuntimeError, TypeError, ValueError):  # DLPack does not support the device
        return rows
    return other if other.data_ptr() == rows.data_ptr() else rows


def _source_of(buffers: PagedKVCache | Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Returns a function that returns the current tensors: moving a cache replaces them."""
    if isinstance(buffers, PagedKVCache):
        # Near blocks stay where they are. Not buffers(): it costs as much as the call.
        return lambda: [*buffers.buffers_of(near=False).values()]
    tensors = list(buffers)
    wrong = [type(each).__name__ for each in tensors if not isinstance(each, Tensor)]
    if wrong:
        raise TypeError(f"expected a PagedKVCache or tensors, got {wrong[0]}: pass the tensors")
    return lambda: tensors


def _common_device(tensors: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(
            f"expected tensors on one device, got {len(tensors)} tensors on "
            f"{sorted(map(str, devices))}: create a BlockSwap per device"
        )
    return devices.pop()


def _num_blocks(
    buffers: PagedKVCache | Sequence[Tensor], first: Tensor, num_blocks: int | None
) -> int:
    if isinstance(buffers, PagedKVCache):
        if num_blocks not in (None, buffers.num_blocks):
            raise ValueError(
                f"expected num_blocks {buffers.num_blocks} of the cache, got {num_blocks}: omit it"
            )
        return buffers.num_blocks
    given = first.shape[0] if num_blocks is None and first.dim() else num_blocks
    return whole("num_blocks (one of them is the null block)", given or 0, 2)
