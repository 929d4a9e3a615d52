"""A planning problem: perturbed needs, grouped into cells by recursive cuts, and candidates."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.demand import Demand, Floats, Points
from compiled_attn.planner.pick import CostOf
from compiled_attn.planner.region import Region

__all__ = ["Problem", "best_cut", "compress", "jitter"]

_CELLS = 2500
_COPIES = 4
_FREQUENT = 0.02  # share of the weight from which a size counts as frequent


class Problem(NamedTuple):
    """Needs in cells, and the buckets that may serve them.

    Shape (n cells, m candidates): corners ``[n, axes]``, the smallest bucket that dominates all
    needs of a cell; weights ``[n]``; top ``[axes]``, the maximum, always a bucket; candidates
    ``[m, axes]``, the corners of cells and of groups of them.
    """

    corners: Points
    weights: Floats
    cost: CostOf
    top: Points
    candidates: Points

    @classmethod
    def of(cls, needs: Demand, region: Region, cost: CostOf, seed: int) -> Problem:
        """Group distinct needs into cells, and collect the candidate buckets for them."""
        points, weights = needs.points, needs.weights
        if len(region.names) > 1:
            points, weights = jitter(points, weights, region.top, seed=seed, allows=region.allows)
        corners, sums, joins = compress(points, weights, cost, _CELLS)
        candidates = np.unique(np.concatenate([corners, joins]), axis=0)
        return cls(corners, sums, cost, region.top, candidates)


class Cut(NamedTuple):
    """Needs up to ``size`` on an axis get their own bucket, which saves ``saving``."""

    saving: float
    axis: int
    size: int


def best_cut(points: Points, weights: Floats, cost: CostOf, top: Points | None = None) -> Cut:
    """Find the cut of needs ``[n, axes]`` with ``weights [n]`` that saves most.

    Without a cut all needs pay for the bucket ``top [axes]``, by default their corner.
    """
    top = points.max(axis=0) if top is None else top
    found = [(top[None], np.zeros(1), np.zeros(1, np.int64), 0)]
    for axis in range(points.shape[1]):
        order = np.argsort(points[:, axis], kind="stable")
        ordered = points[order]
        sizes = ordered[:, axis]
        is_end = np.empty(len(sizes), np.bool_)
        np.greater(sizes[1:], sizes[:-1], out=is_end[:-1])
        is_end[-1] = sizes[-1] < top[axis]
        ends = np.flatnonzero(is_end)
        corners = np.maximum.accumulate(ordered, axis=0)[ends]
        found.append((corners, weights[order].cumsum()[ends], sizes[ends], axis))
    costs = cost(np.concatenate([corners for corners, *_ in found]))
    best, start = Cut(0.0, 0, 0), 0
    for corners, sums, sizes, axis in found:
        savings = sums * (costs[0] - costs[start : start + len(corners)])
        start += len(corners)
        if len(savings) and savings.max() > best.saving:
            at = int(savings.argmax())
            best = Cut(float(savings[at]), axis, int(sizes[at]))
    return best


def compress(
    points: Points, weights: Floats, cost: CostOf, count: int
) -> tuple[Points, Floats, Points]:
    """Make at most ``count`` cells, cutting where rounding needs up to their corner costs most.

    Returns the corners and weights of cells, see `Problem`, and the corners of groups of cells.
    """
    leaves: list[tuple[float, int, Points, Cut]] = []
    joins: list[Points] = []
    numbers = itertools.count()  # so that no two leaves compare by their rows

    def add(rows: Points) -> None:
        cut = best_cut(points[rows], weights[rows], cost)
        heapq.heappush(leaves, (-cut.saving, next(numbers), rows, cut))

    add(np.arange(len(points)))
    while len(leaves) < count and leaves[0][0] < 0:
        _, _, rows, cut = heapq.heappop(leaves)
        joins.append(points[rows].max(axis=0))
        low = points[rows, cut.axis] <= cut.size
        add(rows[low])
        add(rows[~low])
    corners = np.array([points[rows].max(axis=0) for _, _, rows, _ in leaves])
    sums = np.array([weights[rows].sum() for _, _, rows, _ in leaves])
    return corners, sums, np.array(joins, np.int64).reshape(-1, points.shape[1])


def jitter(
    points: Points,
    weights: Floats,
    high: Points,
    *,
    seed: int,
    share: float = 0.25,
    spread: float = 0.1,
    allows: Callable[[Points], NDArray[np.bool_]] | None = None,
) -> tuple[Points, Floats]:
    """Add perturbed copies of the needs, which take ``share`` of the weight.

    Tomorrow's needs are near today's, and sometimes above the largest of them. A size at its limit
    ``high [axes]`` or a frequent size stays: a full step, no context. ``spread`` is the standard
    deviation of the logarithm of a size; an illegal copy falls back to its original.
    """
    rng = np.random.default_rng(seed)
    fixed = (points == high) | np.stack([_frequent(sizes, weights) for sizes in points.T], axis=1)
    together = [points]
    for _ in range(_COPIES):
        factors = np.exp(spread * rng.standard_normal(points.shape))
        moved = np.minimum(np.ceil(points * factors), high).astype(np.int64)
        moved = np.where(fixed, points, moved)
        if allows is not None:
            moved = np.where(allows(moved)[:, None], moved, points)
        together.append(moved)
    parts = [weights * (1 - share), *[weights * share / _COPIES] * _COPIES]
    return np.concatenate(together), np.concatenate(parts)


def _frequent(sizes: Points, weights: Floats) -> NDArray[np.bool_]:
    _, which = np.unique(sizes, return_inverse=True)
    shares = np.bincount(which.reshape(-1), weights) / weights.sum()
    found: NDArray[np.bool_] = (shares >= _FREQUENT)[which.reshape(-1)]
    return found
