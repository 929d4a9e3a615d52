"""The memory of a cache viewed as rows of integers, one row per block, for any dtype and layout.

Copying integers is exact for every dtype (NaN payloads, float8), uses the widest words that fit,
and needs no kernel of that dtype.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.utils.dlpack
from torch import Tensor

from compiled_attn.arguments import whole
from compiled_attn.cache.kv_cache import PagedKVCache

__all__ = ["CacheMemory", "alias"]

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class CacheMemory:
    """The memory of all tensors of a cache.

    Args:
        buffers, num_blocks: see `BlockSwap`.

    Attributes:
        num_blocks: blocks of each tensor.
        bytes_per_block: bytes of a block in all tensors together.
        addresses: address of each tensor when this was created.
        device: device of all tensors.

    Raises:
        ValueError, TypeError: see `BlockSwap`.
    """

    def __init__(self, buffers: PagedKVCache | Sequence[Tensor], num_blocks: int | None) -> None:
        self._tensors = _source_of(buffers)
        tensors = self._tensors()
        self.device = _common_device(tensors)
        self.num_blocks = _num_blocks(buffers, tensors[0], num_blocks)
        rows = self.rows()
        _check_disjoint(rows)
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.bytes_per_block = sum(each[0].nbytes for each in rows)

    def rows(self) -> list[Tensor]:
        """Each tensor as rows of integers ``[num_blocks, words]``."""
        return [_block_rows(tensor, self.num_blocks) for tensor in self._tensors()]

    def has_moved(self) -> bool:
        """Whether the tensors were moved, cast or replaced since this was created."""
        return [tensor.data_ptr() for tensor in self._tensors()] != self.addresses


def alias(rows: Tensor) -> Tensor:
    """Returns a tensor over the same memory that compilers take for another one, if possible."""
    try:
        other: Tensor = torch.utils.dlpack.from_dlpack(rows)
    except (BufferError, RuntimeError, TypeError, ValueError):  # DLPack does not support the device
        return rows
    return other if other.data_ptr() == rows.data_ptr() else rows


def _block_rows(tensor: Tensor, num_blocks: int) -> Tensor:
    """Views memory as integers ``[num_blocks, words]``, of the widest dtype that fits.

    Autograd and compilers don't know that it is a view: a compiled graph that writes to a known
    view copies its base.
    """
    if not tensor.dim() or not tensor.numel() or tensor.shape[0] % num_blocks:
        raise ValueError(
            f"expected axis 0 to be {num_blocks} blocks or a multiple in slots, got a cache of "
            f"shape {list(tensor.shape)}: check num_blocks"
        )
    blocks = tensor.detach().unflatten(0, (num_blocks, -1))
    inside = sorted(range(1, blocks.dim()), key=blocks.stride, reverse=True)
    rows = None
    with contextlib.suppress(RuntimeError):  # a block is in several pieces
        rows = blocks.permute(0, *inside).view(num_blocks, -1)
    if rows is None or (num_blocks > 1 and rows.stride(0) < rows.shape[1]):
        raise ValueError(
            f"expected every block to be contiguous, got shape {list(tensor.shape)} with "
            f"strides {list(tensor.stride())}: keep blocks on axis 0 of a dense tensor"
        )
    for word in _WORDS:
        with contextlib.suppress(RuntimeError):  # too wide for its size, stride or offset
            rows = rows.view(word)
            break
    return alias(torch.empty(0, dtype=rows.dtype, device=rows.device).set_(rows))


def _check_disjoint(rows: Sequence[Tensor]) -> None:
    extents = [(each.data_ptr(), each.stride(0) * each.itemsize, each[0].nbytes) for each in rows]
    blocks = len(rows[0])
    for (i, first), (j, second) in itertools.combinations(enumerate(extents), 2):
        if _overlap(first, second, blocks):
            raise ValueError(
                f"expected caches with memory of their own, got {i} and {j}, which "
                "share some: pass each once, or the tensor that holds both"
            )


def _overlap(first: tuple[int, int, int], second: tuple[int, int, int], blocks: int) -> bool:
    """Whether a byte belongs to both, or (if strides differ) may do so.

    Block ``b`` of an extent ``(address, stride, size)`` is the bytes
    ``address + b * stride + [0, size)``.
    """
    (address, stride, size), (other, other_stride, other_size) = first, second
    if (
        address + (blocks - 1) * stride + size <= other
        or other + (blocks - 1) * other_stride + other_size <= address
    ):
        return False
    ahead = (other - address) % stride
    return stride != other_stride or ahead < size or ahead + other_size > stride


def _source_of(buffers: PagedKVCache | Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Returns a function that returns the current tensors: moving a cache replaces them."""
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
