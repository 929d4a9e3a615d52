"""Adapts buckets to an engine that takes the first fitting one, where more can serve worse."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.greedy import start
from compiled_attn.planner.pick import PickOrder, dominates
from compiled_attn.planner.problem import Problem

__all__ = ["adapt"]

_CANDIDATES = 512
_ROUNDS = 3
_MIN_GAIN = 1e-4  # of the cost


class _Candidates(NamedTuple):
    """Buckets to choose among, in the engine's order.

    Shape (m buckets, n cells): buckets ``[m, axes]``, costs ``[m]``, fits ``[m, n]``, weights
    ``[n]``. The methods take indices of the chosen buckets, ascending.
    """

    buckets: Points
    costs: Floats
    fits: NDArray[np.bool_]
    weights: Floats

    @classmethod
    def of(cls, problem: Problem, buckets: Points, order: PickOrder) -> _Candidates:
        distinct = np.unique(buckets, axis=0)
        ordered = distinct[np.argsort(order(distinct, problem.cost), kind="stable")]
        fits = dominates(ordered, problem.cells.corners)
        return cls(ordered, problem.cost(ordered), fits, problem.cells.weights)

    def first(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """The bucket that serves each cell."""
        found: NDArray[np.int64] = chosen[self.fits[chosen].argmax(axis=0)]
        return found

    def paid(self, chosen: NDArray[np.int64]) -> float:
        return float(self.costs[self.first(chosen)] @ self.weights)

    def paid_without(self, chosen: NDArray[np.int64]) -> Floats:
        """The cost after removing each of the chosen: ``[chosen]``."""
        fits = self.fits[chosen]
        first = fits.argmax(axis=0)
        paid = self.costs[chosen[first]]
        fits[first, np.arange(fits.shape[1])] = False
        second = self.costs[chosen[fits.argmax(axis=0)]]
        more = np.where(fits.any(axis=0), second - paid, 0.0) * self.weights
        found = np.bincount(first, more, len(chosen)) + float(paid @ self.weights)
        return np.asarray(found, np.float64)

    def paid_with(self, chosen: NDArray[np.int64], more: NDArray[np.int64]) -> Floats:
        """The cost after adding each of ``more``: ``[more]``."""
        first = self.first(chosen)
        paid = self.costs[first]
        taken = self.fits[more] & (more[:, None] < first)
        changes: Floats = np.where(taken, self.costs[more, None] - paid, 0.0) @ self.weights
        return changes + float(paid @ self.weights)


def adapt(problem: Problem, buckets: Points, order: PickOrder) -> Points:
    """Return buckets for an engine that picks in another order than by cost.

    Removes each bucket that takes needs away from a cheaper one, and adds what the budget allows,
    as long as that saves under the engine's order.
    """
    buckets = np.unique(np.concatenate([problem.top[None], buckets]), axis=0)
    for _ in range(_ROUNDS):
        found = _Candidates.of(
            problem, np.concatenate([buckets, _promising(problem, buckets)]), order
        )
        at = np.flatnonzero((found.buckets[:, None] == buckets[None]).all(axis=2).any(axis=1))
        before = found.paid(at)
        at = _grow(problem, found, _prune(problem, found, at))
        buckets = found.buckets[at]
        if before - found.paid(at) <= _MIN_GAIN * before:
            break
    return np.asarray(np.unique(buckets, axis=0))


def _prune(problem: Problem, found: _Candidates, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    while True:
        is_top = (found.buckets[chosen] == problem.top).all(axis=1)
        after = np.where(is_top, np.inf, found.paid_without(chosen))
        if after.min() > found.paid(chosen):
            return chosen
        chosen = np.delete(chosen, int(after.argmin()))


def _grow(problem: Problem, found: _Candidates, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    takes = problem.expenses.of(found.buckets)
    while True:
        rest = np.setdiff1d(np.arange(len(found.buckets)), chosen)
        left = 1.0 - takes[chosen].sum(axis=0)
        rest = rest[(takes[rest] <= left + 1e-9).all(axis=1)]
        after = found.paid_with(chosen, rest)
        if not len(rest) or after.min() >= found.paid(chosen) * (1 - _MIN_GAIN):
            return chosen
        chosen = np.sort(np.append(chosen, rest[int(after.argmin())]))


def _promising(problem: Problem, buckets: Points) -> Points:
    """The candidates that would save most if the engine picked by cost."""
    assignment = start(problem, buckets[(buckets < problem.top).any(axis=1)])
    gains = assignment.gains(problem.candidates, problem.cost(problem.candidates))
    best = np.argsort(-gains, kind="stable")[:_CANDIDATES]
    return problem.candidates[best[gains[best] > 0]]
