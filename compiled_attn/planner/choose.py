"""The choice of buckets, and how they serve: lazily greedy by what they save, then swaps.

The saving of a set of buckets is monotone and submodular, so the greedy choice saves at least
1 - 1/e of what the best choice among the same candidates saves (Nemhauser, Wolsey, Fisher, 1978),
and a gain that was computed before can only have shrunk since (Minoux's lazy evaluation).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.cells import CostOf, best_cut, dominates
from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.problem import Problem

__all__ = ["Serving", "cheapest", "grow", "improve", "start"]

_ROUNDS = 40
_ROUND_GAIN = 1e-5
_CANDIDATES_A_ROUND = 256
_SLACK = 1e-9
_BATCH = 48


def start(problem: Problem, buckets: Points | None = None) -> Serving:
    """The maximum alone, or with further buckets."""
    more = [] if buckets is None else [buckets]
    together = np.concatenate([problem.top[None], *more])
    return Serving(problem.cells.corners, problem.cells.weights, problem.cost, together)


def grow(problem: Problem, serving: Serving, left: Floats) -> Floats:
    """Add buckets to what serves a problem while what is ``left`` of the budget allows.

    Each time the candidate that saves most for what it takes of the scarcest part of the budget.

    Args:
        problem: with the candidates.
        serving: it grows.
        left: ``[limits]`` shares of the budget that are not spent.

    Returns:
        ``[limits]`` shares that are left at the end.
    """
    offers = _Offers(problem, serving)
    while (at := offers.best(left)) is not None:
        serving.add(problem.candidates[at])
        left = left - offers.takes[at]
    return left


class _Offers:
    """The candidates of a problem, and at most what each can still save for what it takes."""

    def __init__(self, problem: Problem, serving: Serving) -> None:
        self._candidates, self._serving = problem.candidates, serving
        self._costs = problem.cost(problem.candidates)
        self.takes = problem.expenses.of(problem.candidates)
        self._scarce = np.maximum(self.takes.max(axis=1), 1e-12)
        self._most = serving.gains(problem.candidates, self._costs) / self._scarce
        self._is_fresh = np.ones(len(self._most), np.bool_)

    def best(self, left: Floats) -> int | None:
        """The affordable candidate that saves most for what it takes, which is then taken."""
        self._most[(self.takes > left + _SLACK).any(axis=1)] = 0.0
        while True:
            order = np.argsort(-self._most, kind="stable")[:_BATCH]
            stale = order[~self._is_fresh[order] & (self._most[order] > 0)]
            if self._is_fresh[order[0]] or not len(stale):
                self._is_fresh[:] = False
                return int(order[0]) if self._most[order[0]] > 0 else None
            gains = self._serving.gains(self._candidates[stale], self._costs[stale])
            self._most[stale] = gains / self._scarce[stale]
            self._is_fresh[stale] = True


def improve(problem: Problem, serving: Serving, left: Floats) -> Floats:
    """Shrink buckets, and swap those that are worth least for better ones, while that saves.

    New candidates are the best cuts of the present buckets.

    Returns:
        ``[limits]`` shares of the budget that are left.
    """
    budget = left + problem.expenses.of(serving.buckets).sum(axis=0)
    costs = problem.cost(problem.candidates)
    for _ in range(_ROUNDS):
        before = serving.paid
        serving.shrink()
        gains = serving.gains(problem.candidates, costs)
        best = np.argsort(-gains, kind="stable")[:_CANDIDATES_A_ROUND]
        offered = np.concatenate([_cuts(problem, serving), problem.candidates[best]])
        _swap(problem, serving, offered, budget)
        serving.shrink()
        if before - serving.paid <= _ROUND_GAIN * before:
            break
    return np.asarray(budget - problem.expenses.of(serving.buckets).sum(axis=0))


def _cuts(problem: Problem, serving: Serving) -> Points:
    found = [np.zeros((0, len(problem.top)), np.int64)]
    for number, bucket in enumerate(serving.buckets):
        mine = serving.which == number
        if not mine.any():
            continue
        corners = serving.corners[mine]
        cut = best_cut(corners, serving.weights[mine], problem.cost, bucket)
        if cut.saving > 0:
            found.append(corners[corners[:, cut.axis] <= cut.size].max(axis=0)[None])
    return np.concatenate(found)


def _swap(problem: Problem, serving: Serving, offered: Points, budget: Floats) -> None:
    costs, takes = problem.cost(offered), problem.expenses.of(offered)
    spent = problem.expenses.of(serving.buckets).sum(axis=0)
    gains = serving.gains(offered, costs)
    for at in np.argsort(-gains, kind="stable"):
        candidate = offered[at : at + 1]
        gain = float(serving.gains(candidate, costs[at : at + 1])[0])
        if gain <= _SLACK * serving.paid:
            continue
        serving.add(candidate[0])
        spent = spent + takes[at]
        if (spent <= budget + _SLACK).all():
            continue
        out = _worth_least(problem, serving, spent - budget)
        if out is not None and serving.losses()[out] < gain * (1 - _SLACK):
            spent = spent - problem.expenses.of(serving.buckets[out : out + 1])[0]
            serving.remove(out)
        else:
            spent = spent - takes[at]
            serving.remove(len(serving.buckets) - 1)


def _worth_least(problem: Problem, serving: Serving, over: Floats) -> int | None:
    """The bucket to remove so that the budget holds again; the last one is new."""
    losses = serving.losses()
    takes = problem.expenses.of(serving.buckets)
    losses[(takes < over - _SLACK).any(axis=1)] = np.inf
    losses[-1] = np.inf
    out = int(losses.argmin())
    return out if np.isfinite(losses[out]) else None


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
