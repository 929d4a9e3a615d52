"""A planning problem: needs in cells, their cost and the candidate buckets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from compiled_attn.planner.cells import Cells, compress, jitter
from compiled_attn.planner.demand import Demand, Points
from compiled_attn.planner.pick import CostOf
from compiled_attn.planner.region import Region

__all__ = ["Problem", "check_needs"]

_CELLS = 2500
_CHECKED = 2000


class Problem(NamedTuple):
    """Needs, and the buckets that may serve them.

    Args:
        cells: the needs.
        cost: of points.
        top: ``[axes]`` the maximum, always a bucket.
        candidates: ``[m, axes]``.
    """

    cells: Cells
    cost: CostOf
    top: Points
    candidates: Points

    @classmethod
    def of(cls, needs: Demand, region: Region, cost: CostOf, seed: int) -> Problem:
        """Group distinct needs into cells, and collect the candidate buckets for them."""
        points, weights = needs.points, needs.weights
        if len(region.names) > 1:
            points, weights = jitter(points, weights, region.top, seed=seed, allows=region.allows)
        cells = compress(points, weights, cost, _CELLS)
        candidates = np.unique(np.concatenate([cells.corners, cells.joins]), axis=0)
        return cls(cells, cost, region.top, candidates)


def check_needs(needs: Demand, region: Region, cost: CostOf) -> None:
    """Raise ValueError for a need outside the axes or a cost that is 0 for all or falls.

    The cost is compared with that of the next size on each axis and of the maximum.
    """
    outside = (needs.points > region.top).any(axis=1)
    if outside.any():
        need = dict(zip(needs.names, needs.points[int(outside.argmax())].tolist(), strict=True))
        limits = ", ".join(f"{axis.name} <= {axis.high}" for axis in region.axes)
        raise ValueError(f"expected needs with {limits}, got {need}: raise the axis")
    points, top = needs.points[:: 1 + len(needs) // _CHECKED], region.top
    own = cost(points)
    if not own.any():
        raise ValueError("expected needs that cost something, got a cost of 0: correct the cost")
    larger = [np.broadcast_to(top, points.shape)]
    for axis in range(points.shape[1]):
        sizes = np.unique(np.append(points[:, axis], top[axis]))
        next_one = np.minimum(np.searchsorted(sizes, points[:, axis], "right"), len(sizes) - 1)
        larger.append(points.copy())
        larger[-1][:, axis] = sizes[next_one]
    for above in larger:
        costs = cost(above)
        falls = own > costs * (1 + 1e-9)
        if falls.any():
            at = int(falls.argmax())
            raise ValueError(
                f"expected a cost that never falls where a size grows, got {own[at]:g} for "
                f"{tuple(points[at].tolist())} and {costs[at]:g} for "
                f"{tuple(above[at].tolist())}: correct the cost"
            )
