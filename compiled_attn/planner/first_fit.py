"""Buckets for an engine that takes the first that holds a need: more of them may serve worse."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.cells import dominates
from compiled_attn.planner.choose import start
from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.drift import PickOrder
from compiled_attn.planner.problem import Problem

__all__ = ["mended"]

_CANDIDATES = 512
_ROUNDS = 3
_LEAST = 1e-4  # of what is paid


class _Offers(NamedTuple):
    """Buckets to choose among, all in the engine's order.

    Shape (m buckets, n cells): buckets ``[m, axes]``, costs ``[m]``, holds ``[m, n]``, weights
    ``[n]``. A bucket further down is taken only where none above holds a need.
    """

    buckets: Points
    costs: Floats
    holds: NDArray[np.bool_]
    weights: Floats

    @classmethod
    def of(cls, problem: Problem, buckets: Points, order: PickOrder) -> _Offers:
        """Each bucket once."""
        distinct = np.unique(buckets, axis=0)
        ordered = distinct[np.argsort(order(distinct, problem.cost), kind="stable")]
        holds = dominates(ordered, problem.cells.corners)
        return cls(ordered, problem.cost(ordered), holds, problem.cells.weights)

    def served(self, kept: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
        """What each cell pays if these are there, and by which of them it is held."""
        first = kept[self.holds[kept].argmax(axis=0)]
        return self.costs[first], first

    def paid(self, kept: NDArray[np.int64]) -> float:
        """What all cells pay together."""
        return float(self.served(kept)[0] @ self.weights)

    def without(self, kept: NDArray[np.int64]) -> Floats:
        """What all pay if one of these is taken out, ``[kept]``; the maximum stays."""
        holds = self.holds[kept]
        first = holds.argmax(axis=0)
        columns = np.arange(holds.shape[1])
        paid = self.costs[kept[first]]
        holds[first, columns] = False
        second = self.costs[kept[holds.argmax(axis=0)]]
        more = np.where(holds.any(axis=0), second - paid, 0.0) * self.weights
        found = np.bincount(first, more, len(kept)) + float(paid @ self.weights)
        return np.asarray(found, np.float64)

    def with_each(self, kept: NDArray[np.int64], more: NDArray[np.int64]) -> Floats:
        """What all pay if one of ``more`` joins ``kept``: ``[more]``."""
        paid, first = self.served(kept)
        taken = self.holds[more] & (more[:, None] < first)
        changes: Floats = np.where(taken, self.costs[more, None] - paid, 0.0) @ self.weights
        return changes + float(paid @ self.weights)


def mended(problem: Problem, buckets: Points, order: PickOrder) -> Points:
    """The buckets, changed for an engine that picks in another order than by cost.

    A bucket that keeps needs from a cheaper one is taken out, and what the budget has room for is
    added, one after the other, as long as that saves under the engine's own order.
    """
    kept = np.unique(np.concatenate([problem.top[None], buckets]), axis=0)
    for _ in range(_ROUNDS):
        offers = _Offers.of(problem, np.concatenate([kept, _promising(problem, kept)]), order)
        at = np.flatnonzero((offers.buckets[:, None] == kept[None]).all(axis=2).any(axis=1))
        before = offers.paid(at)
        at = _grown(problem, offers, _without_harm(problem, offers, at))
        kept = offers.buckets[at]
        if before - offers.paid(at) <= _LEAST * before:
            break
    return np.asarray(np.unique(kept, axis=0))


def _without_harm(problem: Problem, offers: _Offers, kept: NDArray[np.int64]) -> NDArray[np.int64]:
    while True:
        stays = (offers.buckets[kept] == problem.top).all(axis=1)
        after = np.where(stays, np.inf, offers.without(kept))
        if after.min() > offers.paid(kept):
            return kept
        kept = np.delete(kept, int(after.argmin()))


def _grown(problem: Problem, offers: _Offers, kept: NDArray[np.int64]) -> NDArray[np.int64]:
    takes = problem.expenses.of(offers.buckets)
    while True:
        rest = np.setdiff1d(np.arange(len(offers.buckets)), kept)
        left = 1.0 - takes[kept].sum(axis=0)
        rest = rest[(takes[rest] <= left + 1e-9).all(axis=1)]
        after = offers.with_each(kept, rest)
        if not len(rest) or after.min() >= offers.paid(kept) * (1 - _LEAST):
            return kept
        kept = np.sort(np.append(kept, rest[int(after.argmin())]))


def _promising(problem: Problem, buckets: Points) -> Points:
    """The candidates that would save most, if the engine took the cheapest bucket."""
    serving = start(problem, buckets[(buckets < problem.top).any(axis=1)])
    gains = serving.gains(problem.candidates, problem.cost(problem.candidates))
    best = np.argsort(-gains, kind="stable")[:_CANDIDATES]
    return problem.candidates[best[gains[best] > 0]]
