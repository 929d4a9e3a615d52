"""Cells: needs that lie close together as one, found by recursive cuts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.demand import Floats, Points

__all__ = ["Cells", "CostOf", "best_cut", "compress", "dominates", "jittered"]

CostOf: TypeAlias = Callable[[Points], Floats]

_COPIES = 4
_OFTEN = 0.02


class Cells(NamedTuple):
    """Needs in groups.

    Shape (n cells, m groups of cells): corners ``[n, axes]``, the least bucket that holds all needs
    of a cell; weights ``[n]``, or ``[demands, n]``; joins ``[m, axes]``, the corners of groups of
    neighbouring cells.
    """

    corners: Points
    weights: Floats
    joins: Points

    def mixed(self, shares: Floats) -> Cells:
        """One demand, in which each has its share ``[demands]`` of the weight."""
        return self._replace(weights=shares @ self.weights)


class Cut(NamedTuple):
    """Needs up to ``size`` on an axis get a bucket of their own, which saves ``saving``."""

    saving: float
    axis: int
    size: int


def best_cut(points: Points, weights: Floats, cost: CostOf, top: Points | None = None) -> Cut:
    """The cut that saves most of needs ``[n, axes]`` with ``weights [n]``.

    All pay for the bucket ``top [axes]``; None: the least that holds them all.
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


def compress(points: Points, weights: Floats, cost: CostOf, count: int) -> Cells:
    """At most ``count`` cells, cut where rounding needs up to their corner costs most.

    Several demands over the same points, ``weights [demands, n]``, get the same cells.
    """
    together = weights if weights.ndim == 1 else weights.sum(axis=0)
    leaves: list[tuple[float, int, Points, Cut]] = []
    joins: list[Points] = []
    numbers = itertools.count()  # no two leaves compare by their rows

    def add(rows: Points) -> None:
        cut = best_cut(points[rows], together[rows], cost)
        heapq.heappush(leaves, (-cut.saving, next(numbers), rows, cut))

    add(np.arange(len(points)))
    while len(leaves) < count and leaves[0][0] < 0:
        _, _, rows, cut = heapq.heappop(leaves)
        joins.append(points[rows].max(axis=0))
        low = points[rows, cut.axis] <= cut.size
        add(rows[low])
        add(rows[~low])
    corners = np.array([points[rows].max(axis=0) for _, _, rows, _ in leaves])
    sums = np.stack([weights[..., rows].sum(axis=-1) for _, _, rows, _ in leaves], axis=-1)
    return Cells(corners, sums, np.array(joins, np.int64).reshape(-1, points.shape[1]))


def jittered(
    points: Points,
    weights: Floats,
    high: Points,
    *,
    seed: int,
    share: float = 0.25,
    spread: float = 0.1,
    allows: Callable[[Points], NDArray[np.bool_]] | None = None,
) -> tuple[Points, Floats]:
    """The needs and copies of them with sizes off by some per cent, which weigh ``share`` of all.

    Tomorrow's needs lie near today's, and sometimes above the largest of them. A size at its limit
    stays, and so does one that occurs often: a full step, no context.

    Args:
        points, weights: ``[n, axes]`` and ``[n]``, or ``[demands, n]``.
        high: ``[axes]`` the limits.
        seed: of the random numbers.
        share: between 0 and 1.
        spread: standard deviation of the logarithm of a size.
        allows: which points are legal; a copy that is not stays where it was.
    """
    rng = np.random.default_rng(seed)
    summed = weights if weights.ndim == 1 else weights.sum(axis=0)
    stays = (points == high) | np.stack([_often(sizes, summed) for sizes in points.T], axis=1)
    together = [points]
    for _ in range(_COPIES):
        factors = np.exp(spread * rng.standard_normal(points.shape))
        moved = np.minimum(np.ceil(points * factors), high).astype(np.int64)
        moved = np.where(stays, points, moved)
        together.append(
            moved if allows is None else np.where(allows(moved)[:, None], moved, points)
        )
    parts = [weights * (1 - share), *[weights * share / _COPIES] * _COPIES]
    return np.concatenate(together), np.concatenate(parts, axis=-1)


def _often(sizes: Points, weights: Floats) -> NDArray[np.bool_]:
    _, which = np.unique(sizes, return_inverse=True)
    shares = np.bincount(which.reshape(-1), weights) / weights.sum()
    frequent: NDArray[np.bool_] = (shares >= _OFTEN)[which.reshape(-1)]
    return frequent


def dominates(buckets: Points, points: Points) -> NDArray[np.bool_]:
    """Which buckets hold which points: ``[buckets, points]``."""
    holds = buckets[:, None, 0] >= points[None, :, 0]
    for axis in range(1, points.shape[1]):
        holds &= buckets[:, None, axis] >= points[None, :, axis]
    return holds
