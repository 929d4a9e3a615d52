"""Chooses a number of buckets: for the demand, then the guard, then what is left over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.demand import Points
from compiled_attn.planner.greedy import grow, improve, start
from compiled_attn.planner.guard import guard
from compiled_attn.planner.one_axis import best_buckets
from compiled_attn.planner.pick import PickOrder, dominates
from compiled_attn.planner.problem import Problem
from compiled_attn.planner.region import Region

__all__ = ["fit", "prune"]


def fit(problem: Problem, region: Region, count: int, rho: float | None) -> Points:
    """Return at most ``count`` buckets ``[k, axes]``; ``rho`` is the guard's multiple.

    The guard has a quarter of the buckets where that reaches ``rho``, or else a sixth. It covers
    what the demand's buckets do not, and its size decides how many they are, so they are chosen
    twice.
    """
    if rho is None:
        return _fill(problem, _best(problem, count), count)
    base = _best(problem, count - count // 4)
    added, reached = guard(region, problem.cost, base, rho, count // 4)
    if reached > rho:
        added, reached = guard(region, problem.cost, base, rho, count // 6)
    again = _best(problem, count - len(added), base)
    more, bound = guard(region, problem.cost, again, max(rho, reached), len(added))
    if bound <= reached:
        base, added, reached = again, more, bound
    buckets = _fill(problem, np.concatenate([base, added]), count)
    if reached > rho:  # spend what the demand has no use for
        more, _ = guard(region, problem.cost, buckets, rho, count - len(buckets))
        buckets = np.concatenate([buckets, more])
    return buckets


def _best(problem: Problem, count: int, begin: Points | None = None) -> Points:
    """Buckets for the demand, maximum first; ``begin`` are buckets to start from."""
    if problem.top.shape == (1,):
        cells = problem.cells
        return best_buckets(cells.corners, cells.weights, problem.cost, problem.top, count)[::-1]
    assignment = start(problem, None if begin is None else begin[1:])
    grow(problem, assignment, count)
    improve(problem, assignment, count)
    return assignment.buckets


def _fill(problem: Problem, buckets: Points, count: int) -> Points:
    """Add the buckets that save most, up to ``count``."""
    assignment = start(problem, buckets[1:])
    grow(problem, assignment, count)
    return np.asarray(np.unique(assignment.buckets, axis=0))


def prune(problem: Problem, buckets: Points, order: PickOrder) -> Points:
    """Remove each bucket that takes needs away from a cheaper one under an engine's order."""
    buckets = buckets[np.argsort(order(buckets, problem.cost), kind="stable")]
    is_top = (buckets == problem.top).all(axis=1)
    costs, fits = problem.cost(buckets), dominates(buckets, problem.cells.corners)
    stays = np.ones(len(buckets), np.bool_)

    def paid(stays: NDArray[np.bool_]) -> float:
        first = (fits & stays[:, None]).argmax(axis=0)
        return float(costs[first] @ problem.cells.weights)

    while True:
        trials = [at for at in np.flatnonzero(stays & ~is_top)]
        after = [paid(stays & (np.arange(len(stays)) != at)) for at in trials]
        if not trials or min(after) > paid(stays):
            return np.asarray(buckets[stays])
        stays[trials[int(np.argmin(after))]] = False
