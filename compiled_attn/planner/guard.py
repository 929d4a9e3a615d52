"""The guard against unexpected demand: no legal need pays above a multiple of its own cost.

A greedy set cover over boxes of legal needs, from the most expensive need that pays too much
downwards: each time the affordable bucket that serves it and helps most others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.pick import CostOf, dominates, picks
from compiled_attn.planner.region import Grid, Region

__all__ = ["guard"]

_BOXES = (8_000, 20_000)
_EMPHASES = (2, 4, 8)
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
    costs = cost(buckets)
    tasks = [_Task.of(region.grid(boxes), cost, buckets, costs) for boxes in _BOXES]
    found = _cover(tasks, rho, most)
    if found is not None:
        return found, rho
    low, high = rho, max(float((task.paid / task.least).max()) for task in tasks)
    best = np.zeros((0, len(region.axes)), np.int64)
    for _ in range(_STEPS):
        middle = float(np.sqrt(low * high))
        found = _cover(tasks, middle, most)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best, high


class _Task(NamedTuple):
    """Boxes of needs: each must be served for a multiple of the cost of its smallest need.

    Shape (n boxes): high ``[n, axes]``; least, most (costs of the corners), paid ``[n]``.
    """

    high: Points
    least: Floats
    most: Floats
    paid: Floats
    cost: CostOf

    @classmethod
    def of(cls, boxes: Grid, cost: CostOf, buckets: Points, costs: Floats) -> _Task:
        least = cost(boxes.low)
        some = least > 0
        high = boxes.high[some]
        paid = costs[picks(buckets, costs, high)]
        return cls(high, least[some], cost(high), paid, cost)


def _cover(tasks: Sequence[_Task], rho: float, most: int) -> Points | None:
    """The smallest of several greedy covers; None where all need more than ``most`` buckets.

    The covers differ in the boxes, and in the weight of expensive needs. A box is fine enough where
    its largest need, as a bucket, is affordable for its smallest; where none is, the largest need
    stands for the box.
    """
    fine = [task for task in tasks if (task.most <= rho * task.least * _MORE).all()]
    usable = fine or [task._replace(least=task.most) for task in tasks]
    best: Points | None = None
    for task in usable:
        for emphasis in _EMPHASES:
            limit = most if best is None else len(best) - 1
            best = best if (found := _greedy(task, rho, limit, emphasis)) is None else found
    return best


def _greedy(task: _Task, rho: float, most: int, emphasis: int) -> Points | None:
    bad = task.paid > rho * task.least * _MORE
    high, own = task.high[bad], task.least[bad]
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
    target = int(own.argmax())
    trials = _trials(high, own, target)
    costs = cost(trials)
    affordable = costs <= rho * own[target] * _MORE
    trials, costs = trials[affordable], costs[affordable]
    helps = dominates(trials, high) & (costs[:, None] <= rho * own[None] * _MORE)
    chosen: Points = trials[int((helps @ (own / own[target]) ** emphasis).argmax())]
    return chosen


def _trials(high: Points, own: Floats, target: int) -> Points:
    """The target, and joins of it with other boxes."""
    others = np.argsort(-own, kind="stable")
    step = -(-len(others) // _TRIALS)
    joins = np.maximum(high[target], high[others[::step]])
    return np.concatenate([high[target][None], joins])
