"""Two small structures over block ids: the free ones, lowest first, and the highest one in use."""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

__all__ = ["FreeList", "HighestUsed"]


class FreeList:
    """The free ids of ``range(start, stop)``, lowest first, O(log n) each.

    Ids that were never taken are only a watermark, so that a pool of a million blocks costs nothing
    to make; ids that came back are in a heap, and all of them are below the watermark.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._next = start
        self._stop = stop
        self._returned: list[int] = []

    def take(self) -> int:
        """Return the lowest free id. The caller has seen that there is one."""
        if self._returned:
            return heappop(self._returned)
        self._next += 1
        return self._next - 1

    def give(self, block: int) -> None:
        """Take ``block`` back."""
        heappush(self._returned, block)

    def __len__(self) -> int:
        return len(self._returned) + self._stop - self._next


class HighestUsed:
    """The highest id whose count in ``refs`` is not zero, O(log n) amortised.

    A heap of all ids that came into use, each once; ids that went out of use since are dropped when
    they surface.
    """

    def __init__(self, refs: array[int]) -> None:
        self._refs = refs
        self._heap: list[int] = []
        self._queued = bytearray(len(refs))

    def add(self, block: int) -> None:
        """Note that ``block`` came into use."""
        if not self._queued[block]:
            self._queued[block] = 1
            heappush(self._heap, -block)

    def get(self) -> int:
        """Return the highest used id, 0 where none is used."""
        while self._heap and not self._refs[-self._heap[0]]:
            self._queued[-heappop(self._heap)] = 0
        return -self._heap[0] if self._heap else 0
