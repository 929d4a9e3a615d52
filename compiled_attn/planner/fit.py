"""Chooses buckets within a budget: for the demand, then the guard, then what is left over."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from compiled_attn.planner.demand import Points
from compiled_attn.planner.greedy import grow, improve, start
from compiled_attn.planner.guard import guard
from compiled_attn.planner.one_axis import best_buckets
from compiled_attn.planner.problem import Budget, Problem
from compiled_attn.planner.region import Region

__all__ = ["fit"]

_GUARD_SHARE = 1 / 6
_MAX_GUARD_SHARE = 1 / 4
_SLACK = 1e-9


class _Guarded(NamedTuple):
    """Buckets for the demand, maximum first, those of the guard, and the multiple it reaches."""

    base: Points
    guards: Points
    reached: float


def fit(problem: Problem, region: Region, budget: Budget, rho: float | None) -> Points:
    """Return buckets ``[k, axes]``; ``rho`` is the guard's multiple, None for no guard.

    Raises:
        ValueError: the budget is too small for the maximum.
    """
    if rho is None:
        return _fill(problem, _best(problem, budget, 0.0))
    found = _guarded(problem, region, budget, rho)
    buckets = _fill(problem, np.concatenate([found.base, found.guards]))
    if found.reached > rho:  # spend what the demand has no use for
        spare = float(1.0 - problem.expenses.of(buckets).sum(axis=0).max())
        more, _ = _guard(problem, region, buckets, rho, budget, spare)
        buckets = np.concatenate([buckets, more])
    return buckets


def _guarded(problem: Problem, region: Region, budget: Budget, rho: float) -> _Guarded:
    """A guard of a quarter of the budget where that reaches ``rho``, or else of a sixth.

    The guard covers what the demand's buckets do not. Its size decides what they may spend, so they
    are chosen twice.
    """
    base = _best(problem, budget, _MAX_GUARD_SHARE)
    added, reached = _guard(problem, region, base, rho, budget, _MAX_GUARD_SHARE)
    if reached > rho:
        added, reached = _guard(problem, region, base, rho, budget, _GUARD_SHARE)
    first = _Guarded(base, added, reached)
    share = float(problem.expenses.of(added).sum(axis=0).max(initial=0.0))
    base = _best(problem, budget, share, base)
    added, reached = _guard(problem, region, base, max(rho, first.reached), budget, share)
    return first if reached > first.reached else _Guarded(base, added, reached)


def _guard(
    problem: Problem, region: Region, buckets: Points, rho: float, budget: Budget, share: float
) -> tuple[Points, float]:
    """As many guard buckets as a share of the budget allows, and the multiple that they reach."""
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
    """Buckets for the demand, maximum first, which leave a share ``reserve`` of the budget.

    ``begin`` are buckets to start from, maximum first.
    """
    if problem.top.shape == (1,) and problem.expenses.counts_only:
        count = _graphs(budget, 1.0) - _graphs(budget, reserve)
        cells = problem.cells
        return best_buckets(cells.corners, cells.weights, problem.cost, problem.top, count)[::-1]
    if (problem.expenses.of(problem.top[None]) > 1 + _SLACK).any():
        raise ValueError(f"expected a budget with room for the maximum, got {budget}: raise it")
    assignment = start(problem, None if begin is None else begin[1:])
    left = 1.0 - problem.expenses.of(assignment.buckets).sum(axis=0)
    reserved = np.full(len(left), reserve)
    if budget.graphs is not None:
        reserved[0] = _graphs(budget, reserve) / budget.graphs
    improve(problem, assignment, grow(problem, assignment, left - np.minimum(reserved, left)))
    return assignment.buckets


def _fill(problem: Problem, buckets: Points) -> Points:
    """Spend the rest of the budget on the buckets that save most."""
    assignment = start(problem, buckets[1:])
    grow(problem, assignment, 1.0 - problem.expenses.of(buckets).sum(axis=0))
    return np.asarray(np.unique(assignment.buckets, axis=0))


def _graphs(budget: Budget, share: float) -> int:
    return 0 if budget.graphs is None else int(budget.graphs * share + _SLACK)
