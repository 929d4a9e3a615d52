"""Buckets for a problem: the best for its demand, a guard beside them, and the budget used up."""

from __future__ import annotations

import numpy as np

from graphs.planner.choose import grow, improve, start
from graphs.planner.demand import Points
from graphs.planner.guard import guard
from graphs.planner.one_axis import best_buckets
from graphs.planner.problem import Budget, Problem
from graphs.planner.region import Region

__all__ = ["fitted", "guarded"]

_GUARD_SHARE = 1 / 6
_GUARD_SHARE_AT_MOST = 1 / 4
_SLACK = 1e-9


def fitted(problem: Problem, budget: Budget) -> Points:
    """The best buckets for the demand that are found within the budget, ``[k, axes]`` in order."""
    return _filled(problem, _best(problem, budget, 0.0))


def guarded(problem: Problem, region: Region, budget: Budget, rho: float) -> tuple[Points, int]:
    """Fitted buckets and those of the guard, and how many the latter are.

    The guard is laid over what is fitted, so it comes second, and what it leaves of the budget is
    fitted once more. It gets a quarter where that keeps the promise, or else a sixth, and what the
    demand has no use for.
    """
    buckets = _best(problem, budget, _GUARD_SHARE_AT_MOST)
    added, reached = _guard(problem, region, buckets, rho, budget, _GUARD_SHARE_AT_MOST)
    if reached > rho:
        added, reached = _guard(problem, region, buckets, rho, budget, _GUARD_SHARE)
    share = float(problem.expenses.of(added).sum(axis=0).max(initial=0.0))
    again = _best(problem, budget, share)
    kept, reached_again = _guard(problem, region, again, reached, budget, share)
    if reached_again <= reached:
        buckets, added = again, kept
        reached = reached_again
    filled = _filled(problem, np.concatenate([buckets, added]))
    if reached <= rho:
        return filled, len(added)
    spare = float(1.0 - problem.expenses.of(filled).sum(axis=0).max())
    more, _ = _guard(problem, region, filled, rho, budget, spare)
    return np.concatenate([filled, more]), len(added) + len(more)


def _guard(
    problem: Problem, region: Region, buckets: Points, rho: float, budget: Budget, share: float
) -> tuple[Points, float]:
    """As many buckets of a guard as a share of the budget has room for, and what they promise."""
    left = 1.0 - problem.expenses.of(buckets).sum(axis=0)
    limits = [_graphs(budget, share)]
    if not problem.expenses.counts_only:
        limits = [n for n in (64, 32, 16, 8, 4, 2, 1) if budget.graphs is None or n <= limits[0]]
    for most in [*limits, 0]:
        added, reached = guard(region, problem.cost, buckets, rho, most)
        if (problem.expenses.of(added).sum(axis=0) <= left + _SLACK).all():
            break
    return added, reached


def _best(problem: Problem, budget: Budget, reserve: float) -> Points:
    """Buckets for the demand, the maximum first; a share of the budget is left over."""
    if problem.top.shape == (1,) and problem.expenses.counts_only:
        count = _graphs(budget, 1.0) - _graphs(budget, reserve)
        cells = problem.cells
        return best_buckets(cells.corners, cells.weights, problem.cost, problem.top, count)[::-1]
    return _near_optimal(problem, budget, reserve)


def _near_optimal(problem: Problem, budget: Budget, reserve: float) -> Points:
    serving = start(problem)
    spent = problem.expenses.of(problem.top[None])[0]
    left = 1.0 - spent
    if (left < -_SLACK).any():
        raise ValueError(f"expected a budget with room for the maximum, got {budget}: raise it")
    kept = np.full(len(left), reserve)
    if budget.graphs is not None:
        kept[0] = _graphs(budget, reserve) / budget.graphs
    kept = np.minimum(kept, left)
    free = grow(problem, serving, left - kept)
    improve(problem, serving, free)
    return serving.buckets


def _filled(problem: Problem, buckets: Points) -> Points:
    """What is left of the budget goes to buckets that save more."""
    serving = start(problem, buckets[1:])
    left = 1.0 - problem.expenses.of(buckets).sum(axis=0)
    grow(problem, serving, left)
    return np.asarray(np.unique(serving.buckets, axis=0))


def _graphs(budget: Budget, share: float) -> int:
    return 0 if budget.graphs is None else int(budget.graphs * share + _SLACK)
