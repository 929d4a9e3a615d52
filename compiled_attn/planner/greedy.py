"""Chooses buckets by lazy greedy selection on their saving, then improves them by swaps.

The saving of a set of buckets is monotone and submodular, so the greedy choice saves at least
1 - 1/e of the best choice among the same candidates (Nemhauser, Wolsey and Fisher, 1978), and a
gain can only shrink as buckets are added (Minoux's lazy evaluation).
"""

from __future__ import annotations

import numpy as np

from compiled_attn.planner.cells import best_cut
from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.pick import CostOf, dominates
from compiled_attn.planner.problem import Problem

__all__ = ["Assignment", "grow", "improve", "start"]

_ROUNDS = 40
_ROUND_GAIN = 1e-5
_CANDIDATES_A_ROUND = 256
_SLACK = 1e-9
_BATCH = 48


def start(problem: Problem, buckets: Points | None = None) -> Assignment:
    """Assign all needs to the maximum alone, or to it and further buckets."""
    more = [] if buckets is None else [buckets]
    together = np.concatenate([problem.top[None], *more])
    return Assignment(problem.cells.corners, problem.cells.weights, problem.cost, together)


def grow(problem: Problem, assignment: Assignment, left: Floats) -> Floats:
    """Add the buckets with the best saving per expense while the budget lasts.

    ``left`` and the result, ``[limits]``, are the unspent shares of the budget before and after.
    """
    candidates = _Candidates(problem, assignment)
    while (at := candidates.best(left)) is not None:
        assignment.add(problem.candidates[at])
        left = left - candidates.takes[at]
    return left


class _Candidates:
    """The candidates of a problem with an upper bound of the saving per expense of each."""

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self._candidates, self._assignment = problem.candidates, assignment
        self._costs = problem.cost(problem.candidates)
        self.takes = problem.expenses.of(problem.candidates)
        self._scarce = np.maximum(self.takes.max(axis=1), 1e-12)
        self._most = assignment.gains(problem.candidates, self._costs) / self._scarce
        self._is_fresh = np.ones(len(self._most), np.bool_)

    def best(self, left: Floats) -> int | None:
        """Return the best affordable candidate, or None where none saves anything."""
        self._most[(self.takes > left + _SLACK).any(axis=1)] = 0.0
        while True:
            order = np.argsort(-self._most, kind="stable")[:_BATCH]
            stale = order[~self._is_fresh[order] & (self._most[order] > 0)]
            if self._is_fresh[order[0]] or not len(stale):
                self._is_fresh[:] = False
                return int(order[0]) if self._most[order[0]] > 0 else None
            gains = self._assignment.gains(self._candidates[stale], self._costs[stale])
            self._most[stale] = gains / self._scarce[stale]
            self._is_fresh[stale] = True


def improve(problem: Problem, assignment: Assignment, left: Floats) -> None:
    """Shrink buckets, and swap the least useful for better ones, while that saves.

    Candidates are the problem's and the best cuts of the present buckets. ``left [limits]`` are the
    unspent shares of the budget.
    """
    budget = left + problem.expenses.of(assignment.buckets).sum(axis=0)
    costs = problem.cost(problem.candidates)
    for _ in range(_ROUNDS):
        before = assignment.paid
        assignment.shrink()
        gains = assignment.gains(problem.candidates, costs)
        best = np.argsort(-gains, kind="stable")[:_CANDIDATES_A_ROUND]
        offered = np.concatenate([_cuts(problem, assignment), problem.candidates[best]])
        _swap(problem, assignment, offered, budget)
        assignment.shrink()
        if before - assignment.paid <= _ROUND_GAIN * before:
            break


def _cuts(problem: Problem, assignment: Assignment) -> Points:
    found = [np.zeros((0, len(problem.top)), np.int64)]
    for number, bucket in enumerate(assignment.buckets):
        mine = assignment.which == number
        if not mine.any():
            continue
        corners = assignment.corners[mine]
        cut = best_cut(corners, assignment.weights[mine], problem.cost, bucket)
        if cut.saving > 0:
            found.append(corners[corners[:, cut.axis] <= cut.size].max(axis=0)[None])
    return np.concatenate(found)


def _swap(problem: Problem, assignment: Assignment, offered: Points, budget: Floats) -> None:
    costs, takes = problem.cost(offered), problem.expenses.of(offered)
    spent = problem.expenses.of(assignment.buckets).sum(axis=0)
    gains = assignment.gains(offered, costs)
    for at in np.argsort(-gains, kind="stable"):
        candidate = offered[at : at + 1]
        gain = float(assignment.gains(candidate, costs[at : at + 1])[0])
        if gain <= _SLACK * assignment.paid:
            continue
        assignment.add(candidate[0])
        spent = spent + takes[at]
        if (spent <= budget + _SLACK).all():
            continue
        out = _least_useful(problem, assignment, spent - budget)
        if out is not None and assignment.losses()[out] < gain * (1 - _SLACK):
            spent = spent - problem.expenses.of(assignment.buckets[out : out + 1])[0]
            assignment.remove(out)
        else:
            spent = spent - takes[at]
            assignment.remove(len(assignment.buckets) - 1)


def _least_useful(problem: Problem, assignment: Assignment, over: Floats) -> int | None:
    """The cheapest bucket to remove to get within the budget, except the last, which is new."""
    losses = assignment.losses()
    takes = problem.expenses.of(assignment.buckets)
    losses[(takes < over - _SLACK).any(axis=1)] = np.inf
    losses[-1] = np.inf
    out = int(losses.argmin())
    return out if np.isfinite(losses[out]) else None


class Assignment:
    """Buckets, with the cheapest and second cheapest one for each cell.

    The first bucket is the maximum: it dominates every cell, is never removed and never shrinks.

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
        """Total cost of the buckets used, weighted."""
        return float(self.first @ self.weights)

    def gains(self, candidates: Points, costs: Floats) -> Floats:
        """Return the saving of each candidate if it alone were added: ``[candidates]``."""
        gains = np.empty(len(candidates))
        for start in range(0, len(candidates), 512):
            part = slice(start, start + 512)
            saved = np.maximum(self.first - costs[part, None], 0.0)
            saved *= dominates(candidates[part], self.corners)
            gains[part] = saved @ self.weights
        return gains

    def losses(self) -> Floats:
        """Return the extra cost of removing each bucket: ``[k]``, infinite for the maximum."""
        extra = (self.second - self.first) * self.weights
        extra[~np.isfinite(extra)] = 0.0  # only needs of the maximum have no second
        losses: Floats = np.bincount(self.which, extra, len(self.buckets)).astype(np.float64)
        losses[0] = np.inf
        return losses

    def add(self, bucket: Points) -> None:
        """Append a bucket ``[axes]``."""
        cost = self._cost(bucket[None])
        price = np.where(dominates(bucket[None], self.corners)[0], cost, np.inf)
        self.second = np.minimum(self.second, np.maximum(self.first, price))
        self.which = np.where(price < self.first, len(self.buckets), self.which)
        self.first = np.minimum(self.first, price)
        self._prices = np.concatenate([self._prices, price[None]])
        self.buckets = np.concatenate([self.buckets, bucket[None]])
        self.costs = np.concatenate([self.costs, cost])

    def remove(self, at: int) -> None:
        """Remove the bucket at an index; later ones move up."""
        lost = (self._prices[at] <= self.second) & np.isfinite(self._prices[at])
        self._prices = np.delete(self._prices, at, axis=0)
        self.buckets, self.costs = np.delete(self.buckets, at, axis=0), np.delete(self.costs, at)
        self.which = self.which - (self.which > at)
        rest = self._prices[:, lost]
        self.which[lost] = rest.argmin(axis=0)
        self.first[lost], self.second[lost] = _two_least(rest)

    def shrink(self) -> None:
        """Shrink each bucket to the needs that it serves, and drop unused ones."""
        while True:
            served = np.zeros_like(self.buckets)
            np.maximum.at(served, self.which, self.corners)
            served[0] = self.buckets[0]
            used = np.bincount(self.which, minlength=len(self.buckets)) > 0
            used[0] = True
            if used.all() and (served == self.buckets).all():
                return
            self._set(served[used])


def _two_least(prices: Floats) -> tuple[Floats, Floats]:
    if len(prices) == 1:
        return prices[0].copy(), np.full(prices.shape[1], np.inf)
    least = np.partition(prices, 1, axis=0)
    return least[0].copy(), least[1].copy()
