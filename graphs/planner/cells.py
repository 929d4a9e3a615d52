"""Cells: needs that lie close together as one, found by recursive cuts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphs.planner.demand import Floats, Points

__all__ = ["Cells", "CostOf", "best_cut", "compress", "dominates", "jittered"]

CostOf: TypeAlias = Callable[[Points], Floats]

_COPIES = 4
_OFTEN = 0.02


class Cells(NamedTuple):
    """Needs in groups.

    Shape (n cells, m groups of cells): corners ``[n, axes]``, the least bucket that holds all needs
    of a cell; weights ``[n]``; joins ``[m, axes]``, the same for groups of neighbouring cells.
    """

    corners: Points
    weights: Floats
    joins: Points


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
    paid = float(cost(top[None])[0])
    best = Cut(0.0, 0, 0)
    for axis in range(points.shape[1]):
        order = np.argsort(points[:, axis], kind="stable")
        ordered = points[order]
        sizes = ordered[:, axis]
        ends = np.flatnonzero(np.append(sizes[1:] > sizes[:-1], sizes[-1] < top[axis]))
        if not len(ends):
            continue
        corners = np.maximum.accumulate(ordered, axis=0)[ends]
        savings = weights[order].cumsum()[ends] * (paid - cost(corners))
        at = int(savings.argmax())
        if savings[at] > best.saving:
            best = Cut(float(savings[at]), axis, int(sizes[ends[at]]))
    return best


def compress(points: Points, weights: Floats, cost: CostOf, count: int) -> Cells:
    """At most ``count`` cells, cut where rounding needs up to their corner costs most."""
    leaves: list[tuple[float, int, Points, Cut]] = []
    joins: list[Points] = []
    numbers = itertools.count()  # no two leaves compare by their rows

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
        points, weights: ``[n, axes]`` and ``[n]``.
        high: ``[axes]`` the limits.
        seed: of the random numbers.
        share: between 0 and 1.
        spread: standard deviation of the logarithm of a size.
        allows: which points are legal; a copy that is not stays where it was.
    """
    rng = np.random.default_rng(seed)
    stays = (points == high) | np.stack([_often(sizes, weights) for sizes in points.T], axis=1)
    together = [points]
    for _ in range(_COPIES):
        factors = np.exp(spread * rng.standard_normal(points.shape))
        moved = np.minimum(np.ceil(points * factors), high).astype(np.int64)
        moved = np.where(stays, points, moved)
        together.append(
            moved if allows is None else np.where(allows(moved)[:, None], moved, points)
        )
    parts = [weights * (1 - share), *[weights * share / _COPIES] * _COPIES]
    return np.concatenate(together), np.concatenate(parts)


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
