"""The memory that recorded calls use: inputs, and allocations with their lifetimes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphs.capture.inputs import byte_range

__all__ = ["Allocation", "InputMemory", "assign_offsets"]

_ALIGNMENT = 64


class Allocation:
    """Memory that a run allocated.

    Attributes:
        address, bytes: where it was.
        begin, end: it is in use from call number `begin` until before call `end`.
        offset: its place in an arena, see `assign_offsets`.
    """

    def __init__(self, tensor: Tensor, begin: int) -> None:
        storage = tensor.untyped_storage()
        self.address, self.bytes = storage.data_ptr(), storage.nbytes()
        self.begin, self.end = begin, begin
        self.offset = 0
        self._storage = StorageWeakRef(storage)

    @property
    def is_freed(self) -> bool:
        """Whether other memory may be at its address by now."""
        return bool(self._storage.expired())

    def contains(self, address: int) -> bool:
        """Whether an address is in it."""
        return self.address <= address < self.address + self.bytes


class InputMemory:
    """The inputs of a run, which it keeps alive.

    Attributes:
        storages: addresses of their storages.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs = [*inputs]
        tensors = [
            (place, tensor)
            for place, tensor in enumerate(inputs)
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.numel()
        ]
        self.storages = {tensor.untyped_storage().data_ptr() for _, tensor in tensors}
        self._spans = sorted((*byte_range(tensor), place) for place, tensor in tensors)
        self._begins = [begin for begin, _, _ in self._spans]
        self._furthest = [*accumulate((end for _, end, _ in self._spans), max)]

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the index of the input that contains an address, and the offset in bytes.

        None: no input does, or several, each of which might be moved without the other.
        """
        found = []
        for i in range(bisect_right(self._begins, address) - 1, -1, -1):
            if self._furthest[i] <= address:
                break
            begin, end, place = self._spans[i]
            if address < end:
                found.append((place, address - begin))
        return found[0] if len(found) == 1 else None


def assign_offsets(allocations: Iterable[Allocation]) -> int:
    """Place allocations in an arena; those in use at the same time do not overlap.

    Returns:
        Bytes of the arena.
    """
    placed: list[Allocation] = []
    size = 0
    for each in sorted(allocations, key=attrgetter("begin")):
        placed = [other for other in placed if other.end > each.begin]
        placed.sort(key=attrgetter("offset"))
        each.offset = 0
        for other in placed:
            if each.offset + each.bytes <= other.offset:
                break
            each.offset = max(each.offset, _aligned(other.offset + other.bytes))
        placed.append(each)
        size = max(size, each.offset + each.bytes)
    return size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
