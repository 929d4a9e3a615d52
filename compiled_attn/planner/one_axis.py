"""The optimal buckets on one axis, by dynamic programming.

With sizes in order, serving those in ``(i, j]`` by bucket ``j`` costs ``cost[j] * weight(i, j]``.
That cost has Monge's property, so the best ``i`` never falls as ``j`` grows: one more bucket takes
O(n log n) by divide and conquer over all sizes at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.pick import CostOf

__all__ = ["best_buckets", "best_sizes"]

Indices = NDArray[np.int64]


def best_buckets(points: Points, weights: Floats, cost: CostOf, top: Points, count: int) -> Points:
    """Return the at most ``count`` buckets ``[k, 1]`` of least cost, ascending up to ``top``.

    Args:
        points, weights: distinct needs ``[n, 1]`` up to ``top``, and ``[n]``.
        cost: of points.
        top: ``[1]``.
        count: at least 1.
    """
    sizes = np.unique(np.append(points[:, 0], top))
    needed = np.zeros(len(sizes))
    needed[np.searchsorted(sizes, points[:, 0])] = weights
    taken = best_sizes(cost(sizes[:, None]), needed, count)
    return np.asarray(sizes[taken][:, None])


def best_sizes(costs: Floats, weights: Floats, count: int) -> Indices:
    """Return ascending indices of the at most ``count`` sizes of least cost, the last included.

    Args:
        costs: ``[n]`` of the sizes in ascending order; must not fall.
        weights: ``[n]`` of the needs of each size, from 0 on.
        count: at least 1.
    """
    total = np.concatenate([[0.0], weights.cumsum()])
    paid = costs * total[1:]  # everything up to j in bucket j
    before: list[Indices] = []
    for _ in range(min(count, len(costs)) - 1):
        best, paid = _one_more(costs, total, paid)
        before.append(best)
    taken = [len(costs) - 1]
    for best in reversed(before):
        if best[taken[-1]] < 0:
            continue
        taken.append(int(best[taken[-1]]))
    return np.array(taken[::-1])


def _one_more(costs: Floats, total: Floats, paid: Floats) -> tuple[Indices, Floats]:
    """For each last bucket j the best one before it, or -1 where none helps, and the cost.

    All j of one depth of the recursion are computed together.
    """
    n = len(costs)
    best, least = np.full(n, -1), paid.copy()
    low, high = np.array([1]), np.array([n - 1])  # ranges of j
    first, last = np.array([0]), np.array([n - 2])  # and of their best i
    while len(low):
        middle = (low + high) // 2
        at, value = _least(costs, total, paid, middle, first, np.minimum(last, middle - 1))
        better = value < least[middle]
        best[middle[better]], least[middle[better]] = at[better], value[better]
        low, high = np.concatenate([low, middle + 1]), np.concatenate([middle - 1, high])
        first, last = np.concatenate([first, at]), np.concatenate([at, last])
        some = low <= high
        low, high, first, last = low[some], high[some], first[some], last[some]
    return best, least


def _least(
    costs: Floats, total: Floats, paid: Floats, j: Indices, first: Indices, last: Indices
) -> tuple[Indices, Floats]:
    """For each j the i in ``first..last`` with the least ``paid[i] + costs[j] * weight(i, j]``."""
    counts = last - first + 1
    starts = np.cumsum(counts) - counts
    i = np.arange(counts.sum()) - np.repeat(starts - first, counts)
    here = np.repeat(j, counts)
    values = paid[i] + costs[here] * (total[here + 1] - total[i + 1])
    least = np.minimum.reduceat(values, starts)
    hits = np.flatnonzero(values == np.repeat(least, counts))
    owner = np.repeat(np.arange(len(j)), counts)[hits]
    _, where = np.unique(owner, return_index=True)
    return i[hits[where]], least
