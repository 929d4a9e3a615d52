"""Buckets learned from recorded sizes: those of a ladder, and more where traffic was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphs.buckets.space import Bucket, BucketSpace
from graphs.errors import BucketOverflow

__all__ = ["buckets_for", "dominates"]

_Points: TypeAlias = NDArray[np.int64]
_Floats: TypeAlias = NDArray[np.float64]

_MOST_POINTS = 1000
_MIN_GAIN = 1e-3  # of what all needs pay


def buckets_for(
    counts: Mapping[tuple[int, ...], float], base: BucketSpace, max_graphs: int
) -> BucketSpace:
    """Add the buckets to `base` that save most on recorded needs.

    All of `base` stays, so every need, recorded or not, is picked a bucket that costs no more than
    the one `base` has for it: whatever the traffic becomes, the result pads no more than `base`.
    Buckets are chosen greedily by their saving (submodular: at least 63 % of the best choice among
    the same candidates), then swapped while that saves. A bucket that saves less than 0.1 % is left
    out.

    Args:
        counts: how often sizes were needed, by their values in the order of `base.names`; needs
            that no bucket holds are ignored.
        base: the ladder, with the cost by which a bucket is picked.
        max_graphs: buckets at most, those of `base` included.

    Raises:
        ValueError: `base` has more buckets than `max_graphs`, or sizes of another number of axes.

    Example::

        recorded = RecordedSizes("sizes.jsonl", space.names)
        space = buckets_for(recorded.counts, space, max_graphs=len(space) + 8)
    """
    if len(base) > max_graphs:
        raise ValueError(
            f"expected max_graphs of at least the {len(base)} buckets of the ladder, got "
            f"{max_graphs}: raise it, or take a coarser ladder"
        )
    points, weights, tops = _held(counts, base)
    room = max_graphs - len(base)
    if not room or not len(points):
        return base
    problem = _Problem(base, points, weights, tops)
    return base.with_buckets(problem.best(room))


def dominates(buckets: _Points, points: _Points) -> NDArray[np.bool_]:
    """Return a mask ``[buckets, points]``: which bucket is at least as large on every axis."""
    found = buckets[:, None, 0] >= points[None, :, 0]
    for axis in range(1, points.shape[1]):
        found &= buckets[:, None, axis] >= points[None, :, axis]
    return found


class _Problem:
    """Needs, what each pays in the ladder, and candidates for more buckets.

    Shape (n needs, m candidates): points ``[n, axes]``; weights, paid ``[n]``;
    candidates ``[m, axes]``; prices ``[m, n]``, infinite where a candidate does not fit.
    """

    def __init__(self, base: BucketSpace, points: _Points, weights: _Floats, tops: _Points) -> None:
        points, weights, tops = _grouped(points, weights, tops)
        self.points, self.weights = points, weights
        self.paid = self._costs(base, tops)
        self.names = base.names
        self.candidates = np.unique(np.concatenate([points, *_corners(points, tops)]), axis=0)
        costs = self._costs(base, self.candidates)
        self._prices = np.where(dominates(self.candidates, points), costs[:, None], np.inf)

    def best(self, count: int) -> list[Bucket]:
        """At most `count` candidates that save most together."""
        least = _MIN_GAIN * float(self.paid @ self.weights)
        chosen: list[int] = []
        while len(chosen) < count and (found := self._next(chosen, least)) is not None:
            chosen.append(found)
        for at in range(len(chosen)):  # earlier choices did not know the later ones
            rest = chosen[:at] + chosen[at + 1 :]
            if (found := self._next(rest, 0.0)) is not None:
                chosen[at] = found
        return [Bucket.of(self.names, tuple(self.candidates[at].tolist())) for at in chosen]

    def _next(self, chosen: list[int], least: float) -> int | None:
        paid = self._prices[chosen].min(axis=0, initial=np.inf)
        saved = np.maximum(np.minimum(self.paid, paid) - self._prices, 0.0) @ self.weights
        if not len(saved) or saved.max() <= least:
            return None
        return int(saved.argmax())

    @staticmethod
    def _costs(base: BucketSpace, points: _Points) -> _Floats:
        rows, which = np.unique(points, axis=0, return_inverse=True)
        costs = [base.cost(Bucket.of(base.names, tuple(row))) for row in rows.tolist()]
        return np.array(costs, np.float64)[which.reshape(-1)]


def _held(
    counts: Mapping[tuple[int, ...], float], base: BucketSpace
) -> tuple[_Points, _Floats, _Points]:
    """Needs that a bucket holds ``[n, axes]``, their weights, and the buckets of the ladder."""
    rows: list[tuple[tuple[int, ...], float, tuple[int, ...]]] = []
    for sizes, count in counts.items():
        if len(sizes) != len(base.names):
            raise ValueError(
                f"expected sizes of {', '.join(base.names)}, got {sizes}: record them again"
            )
        try:
            bucket = base.pick(**dict(zip(base.names, sizes, strict=True)))
        except BucketOverflow:
            continue
        rows.append((sizes, float(count), bucket.sizes))
    axes = len(base.names)
    points = np.array([sizes for sizes, *_ in rows], np.int64).reshape(-1, axes)
    tops = np.array([top for *_, top in rows], np.int64).reshape(-1, axes)
    return points, np.array([count for _, count, _ in rows], np.float64), tops


def _grouped(points: _Points, weights: _Floats, tops: _Points) -> tuple[_Points, _Floats, _Points]:
    """Round needs up until few are distinct, but never above the bucket that the ladder has.

    The most frequent needs stay exact.
    """
    ratio, rounded = 1.0, points
    exact = np.zeros(len(points), np.bool_)
    exact[np.argsort(-weights, kind="stable")[: _MOST_POINTS // 2]] = True
    highest = np.concatenate([np.where(points > 0, tops, 0), tops], axis=1)
    most = max(_MOST_POINTS, int(exact.sum()) + len(np.unique(highest, axis=0)))
    while True:
        rows = np.concatenate([rounded, tops], axis=1)
        rows, which = np.unique(rows, axis=0, return_inverse=True)
        if len(rows) <= most:
            sums = np.bincount(which.reshape(-1), weights).astype(np.float64)
            return rows[:, : points.shape[1]], sums, rows[:, points.shape[1] :]
        ratio = 1.01 if ratio == 1.0 else ratio * ratio
        steps = np.ceil(np.log(np.maximum(points, 1)) / np.log(ratio) - 1e-9)
        up = np.minimum(np.ceil(ratio**steps - 1e-9), tops).astype(np.int64)
        rounded = np.where(exact[:, None] | (points == 0), points, np.maximum(up, points))


def _corners(points: _Points, tops: _Points) -> list[_Points]:
    """The smallest buckets for the needs of one bucket up to each size, along each axis."""
    if points.shape[1] == 1:
        return []  # the needs themselves
    found = []
    for top in np.unique(tops, axis=0):
        mine = points[(tops == top).all(axis=1)]
        for axis in range(points.shape[1]):
            ordered = mine[np.argsort(mine[:, axis], kind="stable")]
            is_end = np.append(ordered[1:, axis] > ordered[:-1, axis], True)
            found.append(np.maximum.accumulate(ordered, axis=0)[is_end])
    return found
