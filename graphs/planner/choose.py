"""The choice of buckets: lazily greedy by what they save, then swaps.

The saving of a set of buckets is monotone and submodular, so the greedy choice saves at least
1 - 1/e of what the best choice among the same candidates saves (Nemhauser, Wolsey, Fisher, 1978),
and a gain that was computed before can only have shrunk since (Minoux's lazy evaluation).
"""

from __future__ import annotations

import numpy as np

from graphs.planner.cells import best_cut
from graphs.planner.demand import Floats, Points
from graphs.planner.problem import Problem
from graphs.planner.serving import Serving

__all__ = ["grow", "improve", "start"]

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
