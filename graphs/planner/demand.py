"""Demands: what steps need, as weighted points over named axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphs.buckets.axes import Axis

__all__ = ["Demand", "Floats", "Points"]

Floats: TypeAlias = NDArray[np.float64]
Points: TypeAlias = NDArray[np.int64]

_LARGEST = 10**12


class Demand:
    """Needs over named axes in the order in which they occurred, each with a weight.

    Immutable. A weight is how often a need occurred, or any share of the whole.

    Args:
        names: the axes.
        points: ``[n, axes]`` whole numbers from 0 on, one need a row.
        weights: ``[n]`` positive numbers; None: 1 each.

    Raises:
        ValueError: no need, no axis, another shape, a negative size, a weight that is not positive
            and finite.
        TypeError: sizes that are not whole numbers.

    Example::

        demand = Demand(("tokens", "blocks"), [(1, 4), (37, 80)], weights=[900, 100])
    """

    def __init__(
        self, names: Sequence[str], points: ArrayLike, weights: ArrayLike | None = None
    ) -> None:
        self.names = tuple(names)
        for name in self.names:
            Axis(name, 0, 0)
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"expected axes, each once, got {list(names)}: name them")
        self.points = _checked_points(self.names, points)
        self.weights = _checked_weights(len(self.points), weights)

    @classmethod
    def mixture(cls, demands: Sequence[Demand], shares: Sequence[float] | None = None) -> Demand:
        """One demand in which each of ``demands`` has its share of the weight, by default equal.

        Raises:
            ValueError: no demand, different axes, or shares that are not positive, one each.
        """
        if not demands or any(set(d.names) != set(demands[0].names) for d in demands):
            axes = " and ".join(", ".join(d.names) for d in demands) or "none"
            raise ValueError(f"expected demands over the same axes, got {axes}: mix what is alike")
        given = [1.0] * len(demands) if shares is None else list(shares)
        if len(given) != len(demands) or not all(0 < share < math.inf for share in given):
            raise ValueError(
                f"expected {len(demands)} positive shares, one for each demand, got {given}"
            )
        names = demands[0].names
        points = [demand.project(names).points for demand in demands]
        weights = [d.weights * (s / d.total) for d, s in zip(demands, given, strict=True)]
        return cls(names, np.concatenate(points), np.concatenate(weights))

    @property
    def total(self) -> float:
        """The sum of the weights: the number of steps, where each counts once."""
        return float(self.weights.sum())

    @property
    def largest(self) -> dict[str, int]:
        """The largest size on each axis."""
        return dict(zip(self.names, self.points.max(axis=0).tolist(), strict=True))

    def histogram(self) -> Demand:
        """The same needs sorted, each once, with the sum of its weights."""
        points, inverse = np.unique(self.points, axis=0, return_inverse=True)
        return Demand(self.names, points, np.bincount(inverse.reshape(-1), self.weights))

    def halves(self) -> tuple[Demand, Demand]:
        """The first and the second half, by weight, in the order of time.

        Raises:
            ValueError: there is only one need.
        """
        if len(self) < 2:
            raise ValueError("expected two needs to halve a demand, got one: record more steps")
        middle = int(np.searchsorted(self.weights.cumsum(), self.total / 2))
        return self[: max(1, middle)], self[max(1, middle) :]

    def project(self, names: Sequence[str]) -> Demand:
        """The demand over some of its axes, in the given order.

        Raises:
            ValueError: an axis that it does not have.
        """
        if unknown := [name for name in names if name not in self.names]:
            raise ValueError(
                f"expected axes of {', '.join(self.names)}, got {', '.join(unknown)}: choose others"
            )
        return Demand(names, self.points[:, [self.names.index(n) for n in names]], self.weights)

    def __getitem__(self, rows: slice) -> Demand:
        return Demand(self.names, self.points[rows], self.weights[rows])

    def __len__(self) -> int:
        return len(self.points)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Demand):
            return NotImplemented
        return (
            self.names == other.names
            and np.array_equal(self.points, other.points)
            and np.array_equal(self.weights, other.weights)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        largest = ", ".join(f"{name}<={size}" for name, size in self.largest.items())
        return f"Demand({len(self)} needs, weight {self.total:g}; {largest})"


def _checked_points(names: tuple[str, ...], points: ArrayLike) -> Points:
    given = np.asarray(points)
    if given.ndim != 2 or given.shape[1] != len(names) or not len(given):
        raise ValueError(
            f"expected points of shape [n, {len(names)}], one column for each of "
            f"{', '.join(names)}, got {list(given.shape)}"
        )
    if given.dtype.kind not in "iu":
        raise TypeError(f"expected whole numbers as sizes, got {given.dtype}: round them up")
    if given.min() < 0 or given.max() > _LARGEST:
        raise ValueError(
            f"expected sizes in 0..{_LARGEST}, got {given.min()}..{given.max()}: correct the needs"
        )
    checked = given.astype(np.int64)
    checked.flags.writeable = False
    return checked


def _checked_weights(count: int, weights: ArrayLike | None) -> Floats:
    given = np.ones(count) if weights is None else np.array(weights, np.float64)
    if given.shape != (count,) or not (np.isfinite(given) & (given > 0)).all():
        raise ValueError(
            f"expected {count} positive finite weights, one for each need, "
            f"got {given.tolist()!r:.60}"
        )
    given.flags.writeable = False
    return given
