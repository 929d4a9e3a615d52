"""The optimal buckets on one axis, by dynamic programming over its sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.pick import CostOf

__all__ = ["best_buckets", "best_sizes"]


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


def best_sizes(costs: Floats, weights: Floats, count: int) -> NDArray[np.int64]:
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
