"""Chooses a number of buckets: for the demand, then the guard, then what is left over."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.cells import Problem
from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.greedy import Assignment, grow, improve
from compiled_attn.planner.guard import guard
from compiled_attn.planner.pick import PickOrder, dominates
from compiled_attn.planner.region import Region

__all__ = ["adapt", "fit"]

_CANDIDATES = 512
_ROUNDS = 3
_MIN_GAIN = 1e-4  # of the cost


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
        sizes = np.unique(np.append(problem.corners, problem.top))
        needed = np.zeros(len(sizes))
        needed[np.searchsorted(sizes, problem.corners[:, 0])] = problem.weights
        taken = _best_sizes(problem.cost(sizes[:, None]), needed, count)
        return np.asarray(sizes[taken][::-1, None])
    assignment = Assignment(problem, problem.candidates[:0] if begin is None else begin[1:])
    grow(problem, assignment, count)
    improve(problem, assignment, count)
    return assignment.buckets


def _fill(problem: Problem, buckets: Points, count: int) -> Points:
    """Add the buckets that save most, up to ``count``."""
    assignment = Assignment(problem, buckets[1:])
    grow(problem, assignment, count)
    return np.asarray(np.unique(assignment.buckets, axis=0))


def _best_sizes(costs: Floats, weights: Floats, count: int) -> NDArray[np.int64]:
    """Return ascending indices of the at most ``count`` sizes of least cost, the last included.

    Takes O(count * n^2).

    Args:
        costs: ``[n]`` of the sizes in ascending order; must not fall.
        weights: ``[n]`` of the needs of each size, from 0 on.
        count: at least 1.
    """
    total, every = weights.cumsum(), np.arange(len(costs))
    between = costs * (total - total[:, None])  # [i, j]: needs above i up to j, in bucket j
    between[np.tri(len(costs), dtype=np.bool_)] = np.inf
    paid = costs * total  # everything up to j in bucket j
    before: list[NDArray[np.int64]] = []
    for _ in range(min(count, len(costs)) - 1):
        split = paid[:, None] + between
        best = split.argmin(axis=0)
        least = split[best, every]
        before.append(np.where(least < paid, best, -1))
        paid = np.minimum(least, paid)
    taken = [len(costs) - 1]
    for best in reversed(before):
        if best[taken[-1]] >= 0:
            taken.append(int(best[taken[-1]]))
    return np.array(taken[::-1])


def adapt(problem: Problem, buckets: Points, order: PickOrder, count: int) -> Points:
    """Return buckets for an engine that picks in another order than by cost.

    There more buckets can serve worse. Removes each bucket that takes needs away from a cheaper
    one, and adds what saves under the engine's order, up to ``count``.
    """
    corners, weights = problem.corners, problem.weights
    for _ in range(_ROUNDS):
        found = np.unique(np.concatenate([buckets, _promising(problem, buckets)]), axis=0)
        found = found[np.argsort(order(found, problem.cost), kind="stable")]
        costs, fits = problem.cost(found), dominates(found, corners)
        numbers, is_top = np.arange(len(found)), (found == problem.top).all(axis=1)
        chosen = (found[:, None] == buckets).all(axis=2).any(axis=1)

        def first(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
            at = np.flatnonzero(chosen)
            return np.asarray(at[fits[at].argmax(axis=0)])  # noqa: B023

        def paid(chosen: NDArray[np.bool_]) -> float:
            return float(costs[first(chosen)] @ weights)  # noqa: B023

        before = paid(chosen)
        while len(trials := np.flatnonzero(chosen & ~is_top)):
            after = [paid(chosen & (numbers != at)) for at in trials]
            if min(after) > paid(chosen):
                break
            chosen[trials[int(np.argmin(after))]] = False
        while chosen.sum() < count:
            now = first(chosen)
            taken = fits & (numbers[:, None] < now)
            changes = np.where(taken, costs[:, None] - costs[now], 0.0) @ weights
            if changes.min() > -_MIN_GAIN * paid(chosen):
                break
            chosen[int(changes.argmin())] = True
        buckets = found[chosen]
        if before - paid(chosen) <= _MIN_GAIN * before:
            break
    return buckets


def _promising(problem: Problem, buckets: Points) -> Points:
    """The candidates that would save most if the engine picked by cost."""
    assignment = Assignment(problem, buckets[(buckets < problem.top).any(axis=1)])
    gains = assignment.gains(problem.candidates, problem.cost(problem.candidates))
    best = np.argsort(-gains, kind="stable")[:_CANDIDATES]
    return problem.candidates[best[gains[best] > 0]]
