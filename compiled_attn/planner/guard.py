"""The guard against unexpected demand: no legal need pays above a multiple of its own cost.

A greedy set cover over boxes of legal needs, from the most expensive need that pays too much
downwards: each time the affordable bucket that serves it and helps most others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.pick import CostOf, dominates, picks
from compiled_attn.planner.region import Region

__all__ = ["guard"]

_BOXES = 20_000
_EMPHASES = (2, 4, 8)  # weights of expensive needs
_TRIALS = 300
_STEPS = 5
_MORE = 1 + 1e-9  # for rounding


def guard(
    region: Region, cost: CostOf, buckets: Points, rho: float, most: int
) -> tuple[Points, float]:
    """Return buckets to add so that no legal need pays more than ``rho`` times its own cost.

    Also returns the multiple: where ``most`` buckets are not enough for ``rho``, a short search
    finds the smallest that they reach. ``buckets [k, axes]`` exist already, with the maximum.
    """
    (low, high), costs = region.grid(_BOXES), cost(buckets)
    some = cost(low) > 0
    low, high = low[some], high[some]
    task = _Task(high, cost(low), cost(high), costs[picks(buckets, costs, high)], cost)
    found = _cover(task, rho, most)
    if found is not None:
        return found, rho
    under, reached = rho, float((task.paid / task.least).max())
    best = np.zeros((0, len(region.axes)), np.int64)
    for _ in range(_STEPS):
        middle = float(np.sqrt(under * reached))
        found = _cover(task, middle, most)
        if found is None:
            under = middle
        else:
            best, reached = found, middle
    return best, reached


class _Task(NamedTuple):
    """Boxes of needs: each must be served for a multiple of the cost of its smallest need.

    Shape (n boxes): high ``[n, axes]``; least, most (costs of the corners), paid ``[n]``.
    """

    high: Points
    least: Floats
    most: Floats
    paid: Floats
    cost: CostOf


def _cover(task: _Task, rho: float, most: int) -> Points | None:
    """The smallest of several greedy covers; None where all need more than ``most`` buckets.

    Boxes are fine enough where the largest need of each, as a bucket, is affordable for its
    smallest. Otherwise the largest need stands for the box.
    """
    is_fine = (task.most <= rho * task.least * _MORE).all()
    own = task.least if is_fine else task.most
    best: Points | None = None
    for emphasis in _EMPHASES:
        limit = most if best is None else len(best) - 1
        best = best if (found := _greedy(task, own, rho, limit, emphasis)) is None else found
    return best


def _greedy(task: _Task, own: Floats, rho: float, most: int, emphasis: int) -> Points | None:
    bad = task.paid > rho * own * _MORE
    high, own = task.high[bad], own[bad]
    added: list[Points] = []
    while len(high):
        if len(added) >= most:
            return None
        bucket = _next(high, own, task.cost, rho, emphasis)
        added.append(bucket)
        price = float(task.cost(bucket[None])[0])
        left = ~((high <= bucket).all(axis=1) & (price <= rho * own * _MORE))
        high, own = high[left], own[left]
    return np.array(added, np.int64).reshape(-1, task.high.shape[1])


def _next(high: Points, own: Floats, cost: CostOf, rho: float, emphasis: int) -> Points:
    """The most helpful of the most expensive need and joins of it with others."""
    target = int(own.argmax())
    others = np.argsort(-own, kind="stable")[:: -(-len(own) // _TRIALS)]
    trials = np.concatenate([high[target][None], np.maximum(high[target], high[others])])
    costs = cost(trials)
    affordable = costs <= rho * own[target] * _MORE
    trials, costs = trials[affordable], costs[affordable]
    helps = dominates(trials, high) & (costs[:, None] <= rho * own[None] * _MORE)
    chosen: Points = trials[int((helps @ (own / own[target]) ** emphasis).argmax())]
    return chosen
