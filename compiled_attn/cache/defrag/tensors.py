"""The tensors of a cache, and whether they still lie where they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compiled_attn.arguments import whole
from compiled_attn.cache.defrag.rows import block_rows, check_disjoint, extent_of
from compiled_attn.cache.kv_cache import PagedKVCache

__all__ = ["CacheMemory"]


class CacheMemory:
    """The memory of all tensors of a cache.

    Args:
        buffers, num_blocks: see `BlockSwap`.

    Attributes:
        num_blocks: blocks of each tensor.
        bytes_per_block: bytes of a block in all tensors together.
        addresses: where each tensor lay when this was made.
        device: of all tensors.

    Raises:
        ValueError, TypeError: see `BlockSwap`.
    """

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

    def is_elsewhere(self) -> bool:
        """Whether the tensors were moved, cast or replaced since this was made."""
        return [tensor.data_ptr() for tensor in self._tensors()] != self.addresses


def _source_of(buffers: PagedKVCache | Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """What gives the tensors as they are now: moving a cache replaces them."""
    if isinstance(buffers, PagedKVCache):
        # Not buffers(): this runs on every call, and that costs as much as the call.
        return lambda: [tensor for tensor in buffers._buffers.values() if tensor is not None]
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
            f"{sorted(map(str, devices))}: make a BlockSwap for each device"
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
