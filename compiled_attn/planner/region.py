"""The region of legal needs, and the most that one of them pays in a set of buckets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.cost import evaluate
from compiled_attn.planner.demand import Demand, Points
from compiled_attn.planner.pick import CostOf, PickOrder, by_cost, picks
from graphs.buckets.space import Axis

__all__ = ["Region"]

_MAX_CELLS = 400_000


class Region:
    """Legal needs: within the axes, and where a predicate holds.

    Args:
        axes: with the smallest and the largest size of a legal need.
        legal: takes sizes by axis, numbers or arrays of them (written with comparisons and ``&``);
            None: all are legal. A box of needs counts as legal if any combination of the low,
            middle and high ends of its axes is.
    """

    def __init__(
        self, axes: Sequence[Axis], legal: Callable[[Mapping[str, Any]], Any] | None = None
    ) -> None:
        self.axes = tuple(axes)
        self.names = tuple(axis.name for axis in axes)
        self.top = np.array([axis.high for axis in axes], np.int64)
        self._legal = legal

    @classmethod
    def of(
        cls,
        demand: Demand,
        axes: Sequence[Axis],
        legal: Callable[[Mapping[str, Any]], Any] | None = None,
    ) -> Region:
        """The region of a demand; an axis that is not given ends at the largest need.

        Raises:
            ValueError: an axis that the demand does not have.
        """
        names = demand.names
        given = {axis.name: axis for axis in axes}
        if unknown := [name for name in given if name not in names]:
            raise ValueError(
                f"expected axes of the demand ({', '.join(names)}), got {', '.join(unknown)}: "
                "leave them out"
            )
        low, high = demand.points.min(axis=0), demand.points.max(axis=0)
        ends = zip(names, low.tolist(), high.tolist(), strict=True)
        return cls([given.get(name, Axis(name, *end)) for name, *end in ends], legal)

    def allows(self, points: Points) -> NDArray[np.bool_]:
        """Return a mask ``[n]``: which of the points ``[n, axes]`` are legal."""
        legal = self._legal or (lambda need: True)
        return evaluate(legal, self.names, points).astype(np.bool_)

    def grid(self, boxes: int) -> tuple[Points, Points]:
        """Return the corners of about ``boxes`` legal boxes at most, in equal ratios on each axis.

        Shape: the smallest and the largest need of each box, ``[n, axes]``. Boxes are adjacent.
        """
        each = max(2, int(boxes ** (1 / len(self.axes))))
        return self._boxes([_ladder(axis, each) for axis in self.axes])

    def worst(self, buckets: Points, cost: CostOf, order: PickOrder = by_cost) -> float:
        """Return an upper bound of what a legal need pays, in multiples of its own cost.

        All needs between two adjacent sizes of the buckets go to the same bucket, so only the
        smallest need of each such box is evaluated. Boxes are cut finer than that, because the
        smallest need of a box may be illegal; where there are too many sizes, some are skipped.
        Both only raise the result. A need of cost 0 does not count. ``buckets [k, axes]`` contain
        the maximum.
        """
        each = int(_MAX_CELLS ** (1 / len(self.axes)))
        ladders = []
        for axis, column in zip(self.axes, buckets.T, strict=True):
            sizes = _thinned(np.unique(column), each)
            more = _ladder(axis, max(2, each - len(sizes)))
            ladders.append(np.unique(np.concatenate([sizes, more])))
        low, high = self._boxes(ladders)
        own = cost(low)
        paid = cost(buckets)[picks(buckets, order(buckets, cost), high)]
        return float((paid / np.where(own > 0, own, np.inf)).max(initial=1.0))

    def _boxes(self, ladders: Sequence[NDArray[np.int64]]) -> tuple[Points, Points]:
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
        return low[some], high[some]


def _ladder(axis: Axis, count: int) -> NDArray[np.int64]:
    """At most ``count`` sizes up to the axis's maximum in equal ratios."""
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
    at = np.unique(np.linspace(0, len(sizes) - 1, count).round().astype(int))
    return np.asarray(sizes[at])
