"""Buckets for an engine that takes the first that holds a need: more of them may serve worse."""

from __future__ import annotations

import numpy as np

from graphs.planner.choose import cheapest, start
from graphs.planner.demand import Points
from graphs.planner.drift import PickOrder
from graphs.planner.problem import Problem

__all__ = ["mended"]

_CANDIDATES = 512
_OFFERS = 32
_ROUNDS = 3
_LEAST = 1e-4  # of what is paid


def mended(problem: Problem, buckets: Points, order: PickOrder) -> Points:
    """The buckets, changed for an engine that picks in another order than by cost.

    A bucket that keeps needs from a cheaper one is taken out, and what the budget has room for is
    added, one after the other, as long as that saves under the engine's own order.
    """
    kept = np.unique(np.concatenate([problem.top[None], buckets]), axis=0)
    for _ in range(_ROUNDS):
        before = _paid(problem, kept, order)
        kept = _grown(problem, _without_harm(problem, kept, order), order)
        if before - _paid(problem, kept, order) <= _LEAST * before:
            break
    return kept


def _paid(problem: Problem, buckets: Points, order: PickOrder) -> float:
    cells = problem.cells
    which = cheapest(buckets, order(buckets, problem.cost), cells.corners)
    return float(problem.cost(buckets)[which] @ cells.weights)


def _without_harm(problem: Problem, buckets: Points, order: PickOrder) -> Points:
    paid, at = _paid(problem, buckets, order), 0
    while at < len(buckets):
        fewer = np.delete(buckets, at, axis=0)
        if (buckets[at] < problem.top).any() and (less := _paid(problem, fewer, order)) <= paid:
            buckets, paid = fewer, less
        else:
            at += 1
    return buckets


def _grown(problem: Problem, buckets: Points, order: PickOrder) -> Points:
    paid = _paid(problem, buckets, order)
    candidates = _promising(problem, buckets, problem.candidates, _CANDIDATES)
    while True:
        left = 1.0 - problem.expenses.of(buckets).sum(axis=0)
        fits = (problem.expenses.of(candidates) <= left + 1e-9).all(axis=1)
        offers = _promising(problem, buckets, candidates[fits], _OFFERS)
        tried = [np.concatenate([buckets, offer[None]]) for offer in offers]
        after = [_paid(problem, each, order) for each in tried]
        if not after or min(after) >= paid * (1 - _LEAST):
            return np.asarray(np.unique(buckets, axis=0))
        buckets, paid = tried[int(np.argmin(after))], min(after)


def _promising(problem: Problem, buckets: Points, candidates: Points, count: int) -> Points:
    """Those that would save most, if the engine took the cheapest bucket."""
    serving = start(problem, buckets[(buckets < problem.top).any(axis=1)])
    gains = serving.gains(candidates, problem.cost(candidates))
    best = np.argsort(-gains, kind="stable")[:count]
    return candidates[best[gains[best] > 0]]
