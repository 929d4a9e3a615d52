"""A Lagrangian lower bound of the cost of any set of ``count`` buckets.

Each need offers a price; a bucket earns what the needs that it dominates offer above its cost, and
no plan earns more than the best ``count`` buckets. For any prices this bounds the cost from below
(Cornuejols, Fisher and Nemhauser, 1977), and a subgradient method raises the bound.

There are too many buckets to evaluate each, so they are grouped into boxes: a box dominates what
its high corner dominates and costs what its low corner costs, which only lowers the bound. The
boxes that earn most are cut repeatedly. Needs are grouped too: a group needs no more than its low
corner, but never pays less than its own cost.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.pick import CostOf, dominates

__all__ = ["lower_bound"]

_GROUPS = 1500
_MIN_BOXES, _BOXES_A_BUCKET = 2500, 12
_ROUNDS = 40
_STEPS = 10
_ROUNDING = 1e-6  # of sums in float32


def lower_bound(
    points: Points, weights: Floats, cost: CostOf, top: Points, count: int, reached: float
) -> float:
    """Return a lower bound of the cost of any ``count`` buckets that include ``top``.

    Args:
        points: ``[n, axes]`` needs.
        weights: ``[n]``.
        cost: of points.
        top: ``[axes]``.
        count: number of buckets, at least 1.
        reached: the cost of a known plan, which sets the step size.
    """
    search = _Search(_Needs(points, weights, cost), top, count, reached)
    boxes = max(_MIN_BOXES, _BOXES_A_BUCKET * count)
    for _ in range(_ROUNDS):
        chosen = search.climb()
        if len(search.low) >= boxes or not search.cut(chosen):
            break
    return max(float(cost(points) @ weights), search.best * (1 - _ROUNDING))


class _Needs:
    """Groups of needs, each represented by its low corner.

    Shape (n groups): corners ``[n, axes]``; weights, own (cost of the needs themselves) ``[n]``.
    """

    def __init__(self, points: Points, weights: Floats, cost: CostOf) -> None:
        own = weights * cost(points)
        groups: list[tuple[float, int, NDArray[np.int64]]] = []
        numbers = itertools.count()

        def add(rows: NDArray[np.int64]) -> None:
            least = float(cost(points[rows].min(axis=0)[None])[0])
            lost = float(own[rows].sum()) - least * float(weights[rows].sum())
            heapq.heappush(groups, (-lost, next(numbers), rows))

        add(np.arange(len(points)))
        enough = _ROUNDING * float(own.sum()) / _GROUPS
        while len(groups) < _GROUPS and -groups[0][0] > enough:
            _, _, rows = heapq.heappop(groups)
            members = points[rows]
            axis = _widest(members.min(axis=0), members.max(axis=0), cost)
            middle = (members[:, axis].min() + members[:, axis].max()) // 2
            add(rows[members[:, axis] <= middle])
            add(rows[members[:, axis] > middle])
        self.cost = cost
        self.corners = np.array([points[rows].min(axis=0) for _, _, rows in groups])
        self.weights = np.array([weights[rows].sum() for _, _, rows in groups])
        self.own = np.array([own[rows].sum() for _, _, rows in groups])


class _Search:
    """Boxes of buckets, prices of needs, and the best bound so far."""

    def __init__(self, needs: _Needs, top: Points, count: int, reached: float) -> None:
        self._needs, self._count, self._reached = needs, count, reached
        self._sizes = [np.unique(column) for column in needs.corners.T]
        self._top = self._prices(top[None], top[None])[0].astype(np.float64)
        self._offers = needs.own * 1.2
        self._scale = np.sqrt(needs.own)
        self._step = 1.0
        self.best = -np.inf
        self.low = np.array([[sizes[0] for sizes in self._sizes]])
        self._high = np.array([[sizes[-1] for sizes in self._sizes]])
        self._box_prices = self._prices(self.low, self._high)

    def climb(self) -> NDArray[np.int64]:
        """Take subgradient steps; return the boxes that earn most at the best offers."""
        best, offers, best_offers = -np.inf, self._offers, self._offers
        chosen = np.zeros(0, np.int64)
        for number in range(_STEPS):
            bound, slope, earning = self._at(offers)
            if bound > best:
                best, best_offers, chosen = bound, offers, earning
            elif number > 2:
                self._step = max(self._step * 0.8, 0.05)
            length = float((slope * slope) @ self._scale)
            if not length or self._reached <= bound:
                break
            far = self._step * (self._reached - bound) / length
            offers = np.maximum(offers + far * slope * self._scale, 0.0)
        self._offers, self._step = best_offers, min(1.0, self._step * 1.3)
        self.best = max(self.best, best)
        return chosen

    def cut(self, chosen: NDArray[np.int64]) -> bool:
        """Halve boxes along their costliest axis; False if all are single buckets."""
        wide = [at for at in chosen.tolist() if (self.low[at] < self._high[at]).any()]
        if not wide:
            return False
        low, high = [], []
        for at in wide:
            axis = _widest(self.low[at], self._high[at], self._needs.cost)
            sizes = self._sizes[axis]
            ends = np.searchsorted(sizes, [self.low[at, axis], self._high[at, axis]])
            middle = int(ends.sum()) // 2
            low += [self.low[at], self.low[at].copy()]
            high += [self._high[at].copy(), self._high[at]]
            high[-2][axis], low[-1][axis] = sizes[middle], sizes[middle + 1]
        new = self._prices(np.array(low), np.array(high))
        self._box_prices = np.concatenate([np.delete(self._box_prices, wide, axis=0), new])
        self.low = np.concatenate([np.delete(self.low, wide, axis=0), low])
        self._high = np.concatenate([np.delete(self._high, wide, axis=0), high])
        return True

    def _prices(self, low: Points, high: Points) -> NDArray[np.float32]:
        needs = self._needs
        prices: Floats = np.maximum(needs.weights * needs.cost(low)[:, None], needs.own)
        prices[~dominates(high, needs.corners)] = np.inf
        single: NDArray[np.float32] = prices.astype(np.float32)
        return single

    def _at(self, offers: Floats) -> tuple[float, Floats, NDArray[np.int64]]:
        saved = np.maximum(offers.astype(np.float32) - self._box_prices, 0)
        earned = saved.sum(axis=1, dtype=np.float64)
        chosen = np.argsort(-earned, kind="stable")[: self._count - 1]
        chosen = chosen[earned[chosen] > 0]
        by_top = np.maximum(offers - self._top, 0.0)
        slope = 1.0 - (saved[chosen] > 0).sum(axis=0) - (by_top > 0)
        return float(offers.sum() - by_top.sum() - earned[chosen].sum()), slope, chosen


def _widest(low: Points, high: Points, cost: CostOf) -> int:
    """The axis along which a box's cost grows most."""
    corners = np.where(np.eye(len(low), dtype=np.bool_), high, low)
    grown = cost(corners) - float(cost(low[None])[0])
    grown[low == high] = -1.0
    return int(grown.argmax())
