"""Chooses buckets by lazy greedy selection on their saving, then improves them by swaps.

The saving of a set of buckets is monotone and submodular, so the greedy choice saves at least
1 - 1/e of the best choice among the same candidates (Nemhauser, Wolsey and Fisher, 1978), and a
gain can only shrink as buckets are added (Minoux's lazy evaluation).
"""

from __future__ import annotations

import numpy as np

from compiled_attn.planner.cells import Problem, best_cut
from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.pick import dominates

__all__ = ["Assignment", "grow", "improve"]

_ROUNDS = 40
_ROUND_GAIN = 1e-5
_CANDIDATES_A_ROUND = 256
_SLACK = 1e-9
_BATCH = 48


def grow(problem: Problem, assignment: Assignment, count: int) -> None:
    """Add the candidates that save most, until there are ``count`` buckets or nothing is saved."""
    candidates, costs = problem.candidates, problem.cost(problem.candidates)
    bounds = assignment.gains(candidates, costs)  # of the gains, which only shrink
    while len(assignment.buckets) < count and bounds.max() > 0:
        best = np.argsort(-bounds, kind="stable")[:_BATCH]
        bounds[best] = assignment.gains(candidates[best], costs[best])
        at = int(bounds.argmax())
        if at in best and bounds[at] > 0:
            assignment.add(candidates[at])


def improve(problem: Problem, assignment: Assignment, count: int) -> None:
    """Shrink buckets, and swap the least useful for better ones, while that saves.

    Candidates are the problem's and the best cuts of the present buckets.
    """
    costs = problem.cost(problem.candidates)
    for _ in range(_ROUNDS):
        before = assignment.paid
        assignment.shrink()
        gains = assignment.gains(problem.candidates, costs)
        best = np.argsort(-gains, kind="stable")[:_CANDIDATES_A_ROUND]
        offered = np.concatenate([_cuts(problem, assignment), problem.candidates[best]])
        _swap(problem, assignment, offered, count)
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


def _swap(problem: Problem, assignment: Assignment, offered: Points, count: int) -> None:
    costs = problem.cost(offered)
    for at in np.argsort(-assignment.gains(offered, costs), kind="stable"):
        gain = float(assignment.gains(offered[at : at + 1], costs[at : at + 1])[0])
        if gain <= _SLACK * assignment.paid:
            continue
        assignment.add(offered[at])
        if len(assignment.buckets) > count:
            losses = assignment.losses()
            out = int(losses[:-1].argmin())
            is_better = losses[out] < gain * (1 - _SLACK)
            assignment.remove(out if is_better else len(losses) - 1)


class Assignment:
    """Buckets, with the cheapest and second cheapest one for each cell.

    The first bucket is the maximum: it dominates every cell, is never removed and never shrinks.

    Args:
        problem: the cells.
        more: ``[k, axes]`` further buckets.
    """

    def __init__(self, problem: Problem, more: Points) -> None:
        self.corners, self.weights, self._cost = problem.corners, problem.weights, problem.cost
        self._set(np.concatenate([problem.top[None], more]))

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
            needed = np.zeros_like(self.buckets)
            np.maximum.at(needed, self.which, self.corners)
            needed[0] = self.buckets[0]
            used = np.bincount(self.which, minlength=len(self.buckets)) > 0
            used[0] = True
            if used.all() and (needed == self.buckets).all():
                return
            self._set(needed[used])


def _two_least(prices: Floats) -> tuple[Floats, Floats]:
    if len(prices) == 1:
        return prices[0].copy(), np.full(prices.shape[1], np.inf)
    least = np.partition(prices, 1, axis=0)
    return least[0].copy(), least[1].copy()
