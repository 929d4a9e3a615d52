"""The memory that recorded calls work on: what a run is given, and what it makes on its way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Given", "Made", "lay_out"]

_ALIGNMENT = 64


class Made:
    """Memory that a run made.

    Attributes:
        address, bytes: where it was.
        begin, end: the calls of the run, by number, in which it must keep what it holds.
        offset: its place in an arena, see `lay_out`.
    """

    def __init__(self, tensor: Tensor, begin: int) -> None:
        storage = tensor.untyped_storage()
        self.address, self.bytes = storage.data_ptr(), storage.nbytes()
        self.begin, self.end = begin, begin
        self.offset = 0
        self._storage = StorageWeakRef(storage)

    @property
    def is_gone(self) -> bool:
        """Whether other memory may be at its address by now."""
        return bool(self._storage.expired())

    def has(self, address: int) -> bool:
        """Whether an address is in it."""
        return self.address <= address < self.address + self.bytes


class Given:
    """The inputs of a run, which are kept as long as this is.

    Attributes:
        storages: where the memory begins that they are in.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs = [*inputs]
        tensors = [
            (place, tensor)
            for place, tensor in enumerate(inputs)
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.numel()
        ]
        self.storages = {tensor.untyped_storage().data_ptr() for _, tensor in tensors}
        self._spans = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), place)
            for place, tensor in tensors
        )
        self._begins = [begin for begin, _, _ in self._spans]
        self._furthest = [*accumulate((end for _, end, _ in self._spans), max)]

    def find(self, address: int) -> tuple[int, int] | None:
        """Which input an address is in, and how many bytes behind its first element.

        None: in none, or in several, of which each might be moved without the other.
        """
        found = []
        for i in range(bisect_right(self._begins, address) - 1, -1, -1):
            if self._furthest[i] <= address:
                break
            begin, end, place = self._spans[i]
            if address < end:
                found.append((place, address - begin))
        return found[0] if len(found) == 1 else None


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()


def lay_out(made: Iterable[Made]) -> int:
    """Gives each a place in an arena, never that of another while both are needed.

    Returns:
        Bytes of the arena.
    """
    placed: list[Made] = []
    size = 0
    for each in sorted(made, key=lambda each: each.begin):
        placed = sorted((other for other in placed if other.end > each.begin), key=_offset)
        each.offset = 0
        for other in placed:
            if each.offset + each.bytes <= other.offset:
                break
            each.offset = max(each.offset, _aligned(other.offset + other.bytes))
        placed.append(each)
        size = max(size, each.offset + each.bytes)
    return size


def _offset(made: Made) -> int:
    return made.offset


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
