"""Regions of legal needs, and the worst that a set of buckets does to one of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.cells import CostOf
from compiled_attn.planner.demand import Floats, Points
from graphs.buckets.axes import Axis, Bucket

__all__ = ["Grid", "Region"]

_MOST_CELLS = 400_000


class Grid(NamedTuple):
    """Boxes of needs, side by side.

    Shape: low, high ``[n, axes]``, the least and the largest need of each box.
    """

    low: Points
    high: Points


class Region:
    """Legal needs: between the ends of the axes, and where a predicate says so.

    Args:
        axes: with the least and the largest size of a legal need.
        legal: takes sizes by axis, numbers or arrays of them (written with comparisons and ``&``);
            None: all are legal. A box of needs counts as legal where one at the low, middle or high
            end of each axis is.
    """

    def __init__(
        self, axes: Sequence[Axis], legal: Callable[[Mapping[str, Any]], Any] | None = None
    ) -> None:
        self.axes = tuple(axes)
        self.names = tuple(axis.name for axis in axes)
        self.top = np.array([axis.high for axis in axes], np.int64)
        self._legal = legal

    def allows(self, points: Points) -> NDArray[np.bool_]:
        """Which of the points ``[n, axes]`` are legal needs: ``[n]``."""
        if self._legal is None:
            return np.ones(len(points), np.bool_)
        try:
            found = np.asarray(self._legal(dict(zip(self.names, points.T, strict=True))))
            return np.broadcast_to(found, len(points)).astype(np.bool_)
        except (TypeError, ValueError, AttributeError):
            rows = [Bucket.of(self.names, tuple(row)) for row in points.tolist()]
            return np.array([bool(self._legal(row)) for row in rows], np.bool_)

    def grid(self, boxes: int) -> Grid:
        """About ``boxes`` legal boxes at most, each axis in equal ratios, small sizes singly."""
        each = max(2, int(boxes ** (1 / len(self.axes))))
        return self._boxes([_ladder(axis, each) for axis in self.axes])

    def worst(
        self, buckets: Points, costs: Floats, cost: CostOf, ranks: Floats | None = None
    ) -> float:
        """How many times its own cost a legal need pays at most, or slightly more than that.

        All needs between two sizes of the buckets go to the same bucket, so only the least need of
        each such box is looked at. Boxes are cut finer than that, because the least need of a box
        may not be legal; where there are too many sizes, some are skipped. Both only raise the
        result. A need of cost 0 does not count.

        Args:
            buckets: ``[k, axes]``, the maximum among them.
            costs: ``[k]``.
            cost: of points.
            ranks: ``[k]``: of the buckets that hold a need, the lowest serves it; None: the costs.
        """
        each = int(_MOST_CELLS ** (1 / len(self.axes)))
        ladders = []
        for axis, column in zip(self.axes, buckets.T, strict=True):
            sizes = _thinned(np.unique(column), each)
            more = _ladder(axis, max(2, each - len(sizes)))
            ladders.append(np.unique(np.concatenate([sizes, more])))
        boxes = self._boxes(ladders)
        own = cost(boxes.low)
        paid = prices(boxes.high, ladders, buckets, costs, ranks)
        return float((paid / np.where(own > 0, own, np.inf)).max(initial=1.0))

    def _boxes(self, ladders: Sequence[NDArray[np.int64]]) -> Grid:
        lows = [
            np.concatenate([[min(axis.low, int(ladder[0]))], ladder[:-1] + 1])
            for axis, ladder in zip(self.axes, ladders, strict=True)
        ]
        low = np.stack([side.reshape(-1) for side in np.meshgrid(*lows, indexing="ij")], axis=1)
        high = np.stack([s.reshape(-1) for s in np.meshgrid(*ladders, indexing="ij")], axis=1)
        some = self.allows(low)
        ends = (low, high, (low + high) // 2)
        for sides in itertools.product(range(3), repeat=len(self.axes)):
            rest = np.flatnonzero(~some)
            at = np.stack([ends[side][rest, axis] for axis, side in enumerate(sides)], axis=1)
            some[rest] = self.allows(at)
        return Grid(low[some], high[some])


def prices(
    highs: Points,
    ladders: Sequence[NDArray[np.int64]],
    buckets: Points,
    costs: Floats,
    ranks: Floats | None = None,
) -> Floats:
    """The cost of the bucket of lowest rank (None: the cheapest) for boxes: ``[n]``.

    Their high corners lie on ``ladders``.
    """
    table = np.full([len(ladder) for ladder in ladders], np.inf)
    for at in np.argsort(-(costs if ranks is None else ranks), kind="stable"):
        ends = zip(ladders, buckets[at], strict=True)
        table[tuple(slice(0, np.searchsorted(la, size, "right")) for la, size in ends)] = costs[at]
    places = zip(ladders, highs.T, strict=True)
    found: Floats = table[tuple(np.searchsorted(ladder, column) for ladder, column in places)]
    return found


def _ladder(axis: Axis, count: int) -> NDArray[np.int64]:
    """At most ``count`` sizes up to the axis's largest, none more than a ratio above the last."""
    ratio = 1.01
    while count >= 4:
        sizes = [axis.low]
        while sizes[-1] < axis.high:
            sizes.append(min(axis.high, max(sizes[-1] + 1, math.floor(sizes[-1] * ratio))))
        if len(sizes) <= count:
            return np.array(sizes, np.int64)
        ratio *= 1.02
    return np.array([axis.high], np.int64)


def _thinned(sizes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    if len(sizes) <= count:
        return sizes
    kept: NDArray[np.int64] = sizes[
        np.unique(np.linspace(0, len(sizes) - 1, count).round().astype(int))
    ]
    return kept
