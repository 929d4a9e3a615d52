"""Picking rules of engines: the cheapest bucket that fits a need, or the first by size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.demand import Floats, Points
from graphs.buckets.learned import dominates

__all__ = ["CostOf", "PickOrder", "by_cost", "by_size", "dominates", "picks"]

CostOf: TypeAlias = Callable[[Points], Floats]
PickOrder: TypeAlias = Callable[[Points, CostOf], Floats]
"""Ranks of buckets ``[k, axes]``: the engine picks the lowest rank that dominates a need."""


def by_cost(buckets: Points, cost: CostOf) -> Floats:
    """Pick the cheapest bucket, as `BucketSpace.pick` does."""
    return cost(buckets)


def by_size(buckets: Points, cost: CostOf) -> Floats:
    """Pick the first bucket in lexicographic order of the sizes."""
    ranks = np.empty(len(buckets))
    ranks[np.lexsort(buckets.T[::-1])] = np.arange(len(buckets))
    return ranks


def picks(buckets: Points, ranks: Floats, points: Points) -> NDArray[np.int64]:
    """Return the index ``[n]`` of the bucket that serves each point, -1 where none dominates it.

    Shape: buckets ``[k, axes]``, ranks ``[k]``, points ``[n, axes]``.
    """
    order = np.lexsort((*buckets.T[::-1], ranks))
    which = np.empty(len(points), np.int64)
    for start in range(0, len(points), 4096):
        fits = dominates(buckets[order], points[start : start + 4096])
        which[start : start + 4096] = np.where(fits.any(axis=0), order[fits.argmax(axis=0)], -1)
    return which
