"""The usual ladders of a region within a budget: what a plan is measured against by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from graphs.buckets.ladders import exponential, linear
from graphs.buckets.space import BucketSpace
from graphs.planner.budget import Budget
from graphs.planner.demand import Points
from graphs.planner.region import Region

__all__ = ["usual_ladders"]

_MOST = 4096  # buckets of a product before those that no need reaches are left out


def usual_ladders(region: Region, limits: Budget) -> dict[str, BucketSpace]:
    """Linear and exponential ladders with as many sizes on each axis as the graphs allow.

    Buckets that are no legal need themselves are left out; the maximum is always there.
    """
    tops = dict(zip(region.names, region.top.tolist(), strict=True))
    makers: Mapping[str, Callable[[int], BucketSpace]] = {
        "linear": lambda n: linear(**{name: _steps(top, n) for name, top in tops.items()}),
        "exponential": lambda n: exponential(
            **{name: (min(1, top), top, n) for name, top in tops.items()}
        ),
    }
    found = {name: _largest(make, region, limits.graphs or 64) for name, make in makers.items()}
    return {name: space for name, space in found.items() if space is not None}


def _steps(top: int, count: int) -> tuple[int, int, int]:
    step = max(1, -(-top // count))
    return min(step, top), step, top


def _largest(make: Callable[[int], BucketSpace], region: Region, most: int) -> BucketSpace | None:
    best, before = None, 0
    for count in range(1, most + 1):
        space = make(count)
        if len(space) > _MOST or len(kept := _legal(space, region)) > most:
            break
        if len(kept) >= before:
            best, before = BucketSpace(region.names, map(tuple, kept.tolist())), len(kept)
    return best


def _legal(space: BucketSpace, region: Region) -> Points:
    sizes = np.array([[bucket[name] for name in region.names] for bucket in space], np.int64)
    kept = sizes[region.allows(sizes)]
    return np.unique(np.concatenate([kept, region.top[None]]), axis=0)
