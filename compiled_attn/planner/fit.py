"""Buckets for a problem: the best for its demand, a guard beside them, and the budget used up."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from compiled_attn.planner.choose import grow, improve, start
from compiled_attn.planner.demand import Points
from compiled_attn.planner.guard import guard
from compiled_attn.planner.one_axis import best_buckets
from compiled_attn.planner.problem import Budget, Problem
from compiled_attn.planner.region import Region

__all__ = ["Fit", "fitted", "guarded"]

_GUARD_SHARE = 1 / 6
_GUARD_SHARE_AT_MOST = 1 / 4
_SLACK = 1e-9


class Fit(NamedTuple):
    """Buckets, and what it takes to fit them to a demand near the first.

    Args:
        buckets: ``[k, axes]`` in order, those of a guard among them.
        guards: how many are there for the guard alone.
        base: ``[n, axes]`` the buckets before the guard, the maximum first.
        share: of the budget, for the guard.
        reached: the multiple that the guard keeps; 1 without a guard.
    """

    buckets: Points
    guards: int
    base: Points
    share: float = 0.0
    reached: float = 1.0


def fitted(problem: Problem, budget: Budget, before: Fit | None = None) -> Fit:
    """The best buckets for the demand that are found within the budget; ``before`` is a start."""
    base = _best(problem, budget, 0.0, None if before is None else before.base)
    return Fit(_filled(problem, base), 0, base)


def guarded(
    problem: Problem, region: Region, budget: Budget, rho: float, before: Fit | None = None
) -> Fit:
    """Fitted buckets and those of the guard.

    The guard is laid over what is fitted, so it comes second, and what it leaves of the budget is
    fitted once more. It gets a quarter where that keeps the promise, or else a sixth, and what the
    demand has no use for; after a fit ``before``, what it had there.
    """
    first = before or _first(problem, region, budget, rho)
    base = _best(problem, budget, first.share, first.base)
    asked = max(rho, first.reached)
    added, reached = _guard(problem, region, base, asked, budget, first.share)
    found = Fit(np.concatenate([base, added]), len(added), base, first.share, reached)
    if before is None and reached > first.reached:
        found = first
    filled, guards = _filled(problem, found.buckets), found.guards
    if found.reached > rho:
        spare = float(1.0 - problem.expenses.of(filled).sum(axis=0).max())
        more, _ = _guard(problem, region, filled, rho, budget, spare)
        filled, guards = np.concatenate([filled, more]), guards + len(more)
    return found._replace(buckets=filled, guards=guards)


def _first(problem: Problem, region: Region, budget: Budget, rho: float) -> Fit:
    """Buckets and a guard, with nothing done about what the guard leaves."""
    base = _best(problem, budget, _GUARD_SHARE_AT_MOST)
    added, reached = _guard(problem, region, base, rho, budget, _GUARD_SHARE_AT_MOST)
    if reached > rho:
        added, reached = _guard(problem, region, base, rho, budget, _GUARD_SHARE)
    share = float(problem.expenses.of(added).sum(axis=0).max(initial=0.0))
    return Fit(np.concatenate([base, added]), len(added), base, share, reached)


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


def _best(problem: Problem, budget: Budget, reserve: float, begin: Points | None = None) -> Points:
    """Buckets for the demand, the maximum first; a share of the budget is left over.

    Args:
        problem, budget: of the demand.
        reserve: that share.
        begin: buckets to begin with, the maximum first; None: the maximum alone.
    """
    if problem.top.shape == (1,) and problem.expenses.counts_only:
        count = _graphs(budget, 1.0) - _graphs(budget, reserve)
        cells = problem.cells
        return best_buckets(cells.corners, cells.weights, problem.cost, problem.top, count)[::-1]
    if (problem.expenses.of(problem.top[None]) > 1 + _SLACK).any():
        raise ValueError(f"expected a budget with room for the maximum, got {budget}: raise it")
    serving = start(problem, None if begin is None else begin[1:])
    left = 1.0 - problem.expenses.of(serving.buckets).sum(axis=0)
    kept = np.full(len(left), reserve)
    if budget.graphs is not None:
        kept[0] = _graphs(budget, reserve) / budget.graphs
    free = grow(problem, serving, left - np.minimum(kept, left))
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
