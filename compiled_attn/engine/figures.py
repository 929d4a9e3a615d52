"""Figures of a fixed size: the quantiles of any number of durations, a curve of any length."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["BINS", "Series", "bin_of", "quantile"]

_LEAST_S = 1e-6
_GROWTH = 1.02
_MOST = 1024  # points of a curve

BINS = 1280
"""Bins of a histogram: each is 2 % wide, from a microsecond to 28 hours.

The middle of a bin is within 1 % of everything in it (DDSketch, Masson et al., VLDB 2019).
"""


def bin_of(seconds: float) -> int:
    """The bin that a duration falls into; shorter and longer ones fall into the outermost."""
    if not seconds > _LEAST_S:
        return 0
    return int(min(BINS - 1, math.log(seconds / _LEAST_S) / math.log(_GROWTH)))


def quantile(counts: NDArray[np.float64], share: float) -> float:
    """The duration in seconds that ``share`` of all reach at most, within 1 %; 0 without any.

    Args:
        counts: ``[BINS]``, how many durations fell into each bin.
        share: of the durations, 0 to 1.
    """
    total = counts.sum()
    if not total:
        return 0.0
    rank = max(1.0, math.ceil(share * total))
    return float(_LEAST_S * _GROWTH ** (int(np.searchsorted(counts.cumsum(), rank)) + 0.5))


class Series:
    """Every n-th point of a curve, n doubling whenever there are more than a thousand.

    The points are kept by their numbers, so that one that is put again changes nothing.
    """

    def __init__(self) -> None:
        self._every = 1
        self._points: dict[int, tuple[float, ...]] = {}

    def put(self, number: int, *point: float) -> None:
        """Keeps point ``number``, if it is one that is kept."""
        if number % self._every:
            return
        self._points[number] = point
        if len(self._points) > _MOST:
            every = 2 * self._every
            kept = {n: p for n, p in self._points.items() if n % every == 0}
            self._every, self._points = every, kept

    def columns(self) -> list[tuple[float, ...]]:
        """The points column by column; none where there is no point."""
        return list(zip(*self._points.values(), strict=True))
