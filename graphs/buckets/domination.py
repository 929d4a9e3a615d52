"""The cheapest point that dominates a query, by a binary search per axis and an AND of bit sets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["CheapestDominating"]


class CheapestDominating:
    """Finds the first point, in the given order, that is at least a query on every axis.

    For each axis, the distinct sizes are kept sorted, and for each of them the set of points that
    are at least so large, as the bits of one int: bit r for the point of rank r. A query ANDs one
    set per axis; its lowest bit is the answer. On a single axis the lowest bits are worked out
    beforehand, so that a query is the binary search alone.
    """

    def __init__(self, points: Sequence[tuple[int, ...]]) -> None:
        axes = range(len(points[0]))
        self._columns = [_column([point[axis] for point in points]) for axis in axes]
        self._only: list[int] | None = None
        if len(self._columns) == 1:
            self._only = [_lowest_bit(bits) for bits in self._columns[0][1]]

    def rank(self, query: Sequence[int]) -> int:
        """The rank of the first point that dominates `query`, or -1 if none does."""
        if self._only is not None:
            return self._only[bisect_left(self._columns[0][0], query[0])]
        bits = -1
        for (sizes, sets), value in zip(self._columns, query, strict=True):
            bits &= sets[bisect_left(sizes, value)]
        return _lowest_bit(bits)


def _column(values: list[int]) -> tuple[list[int], list[int]]:
    sizes = sorted(set(values))
    by_size: dict[int, int] = dict.fromkeys(sizes, 0)
    for rank, value in enumerate(values):
        by_size[value] |= 1 << rank
    sets = [0]  # nothing is larger than the largest
    for size in reversed(sizes):
        sets.append(sets[-1] | by_size[size])
    return sizes, sets[::-1]


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
