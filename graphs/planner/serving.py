"""A set of buckets at work: which cell goes to which bucket, and what each bucket is worth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from graphs.planner.cells import CostOf, dominates
from graphs.planner.demand import Floats, Points

__all__ = ["Serving", "cheapest"]


class Serving:
    """Buckets, and for each cell the cheapest and the second cheapest that holds it.

    The first bucket is the maximum: it holds every cell, is never removed and never shrinks.

    Shape: corners of the cells ``[n, axes]``, weights ``[n]``, buckets ``[k, axes]``.
    """

    def __init__(self, corners: Points, weights: Floats, cost: CostOf, buckets: Points) -> None:
        self.corners, self.weights, self._cost = corners, weights, cost
        self._set(buckets)

    def _set(self, buckets: Points) -> None:
        self.buckets, self.costs = buckets, self._cost(buckets)
        self._prices = np.where(dominates(buckets, self.corners), self.costs[:, None], np.inf)
        self.which = self._prices.argmin(axis=0)
        self.first, self.second = _two_least(self._prices)

    @property
    def paid(self) -> float:
        """What the cells pay together."""
        return float(self.first @ self.weights)

    def gains(self, candidates: Points, costs: Floats) -> Floats:
        """What each candidate would save, added alone: ``[candidates]``."""
        gains = np.empty(len(candidates))
        for start in range(0, len(candidates), 512):
            part = slice(start, start + 512)
            saved = np.maximum(self.first - costs[part, None], 0.0)
            saved *= dominates(candidates[part], self.corners)
            gains[part] = saved @ self.weights
        return gains

    def losses(self) -> Floats:
        """What removing each bucket would cost: ``[k]``, infinite for the maximum."""
        extra = (self.second - self.first) * self.weights
        extra[~np.isfinite(extra)] = 0.0  # only the maximum has no second
        losses: Floats = np.bincount(self.which, extra, len(self.buckets)).astype(np.float64)
        losses[0] = np.inf
        return losses

    def add(self, bucket: Points) -> None:
        """Add ``[axes]`` a bucket, the last from now on."""
        cost = self._cost(bucket[None])
        price = np.where(dominates(bucket[None], self.corners)[0], cost, np.inf)
        self.second = np.minimum(self.second, np.maximum(self.first, price))
        self.which = np.where(price < self.first, len(self.buckets), self.which)
        self.first = np.minimum(self.first, price)
        self._prices = np.concatenate([self._prices, price[None]])
        self.buckets = np.concatenate([self.buckets, bucket[None]])
        self.costs = np.concatenate([self.costs, cost])

    def remove(self, at: int) -> None:
        """Remove a bucket; those behind it move up."""
        lost = (self._prices[at] <= self.second) & np.isfinite(self._prices[at])
        self._prices = np.delete(self._prices, at, axis=0)
        self.buckets, self.costs = np.delete(self.buckets, at, axis=0), np.delete(self.costs, at)
        self.which = self.which - (self.which > at)
        rest = self._prices[:, lost]
        self.which[lost] = rest.argmin(axis=0)
        self.first[lost], self.second[lost] = _two_least(rest)

    def shrink(self) -> None:
        """Make each bucket as small as what it serves, and drop those that serve nothing."""
        while True:
            served = np.zeros_like(self.buckets)
            np.maximum.at(served, self.which, self.corners)
            served[0] = self.buckets[0]
            used = np.bincount(self.which, minlength=len(self.buckets)) > 0
            used[0] = True
            if used.all() and (served == self.buckets).all():
                return
            self._set(served[used])


def cheapest(buckets: Points, costs: Floats, points: Points) -> NDArray[np.int64]:
    """The cheapest bucket that holds each point, as `BucketSpace.pick` finds it: ``[n]``, or -1.

    Shape: buckets ``[k, axes]``, costs ``[k]``, points ``[n, axes]``.
    """
    order = np.lexsort((*buckets.T[::-1], costs))
    which = np.empty(len(points), np.int64)
    for start in range(0, len(points), 4096):
        holds = dominates(buckets[order], points[start : start + 4096])
        which[start : start + 4096] = np.where(holds.any(axis=0), order[holds.argmax(axis=0)], -1)
    return which


def _two_least(prices: Floats) -> tuple[Floats, Floats]:
    if len(prices) == 1:
        return prices[0].copy(), np.full(prices.shape[1], np.inf)
    least = np.partition(prices, 1, axis=0)
    return least[0].copy(), least[1].copy()
