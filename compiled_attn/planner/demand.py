"""Demands: needs of steps as weighted points over named axes, read from JSON lines."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compiled_attn.errors import DemandFileError
from graphs.buckets.space import Axis, whole
from graphs.errors import clipped, parse_json, quoted

__all__ = ["Demand", "Floats", "Points", "read_demand"]

Floats: TypeAlias = NDArray[np.float64]
Points: TypeAlias = NDArray[np.int64]

_LARGEST = 10**12
_REASON = 300  # characters


class Demand:
    """Needs over named axes in order of occurrence, each with a weight. Immutable.

    Args:
        names: the axes.
        points: ``[n, axes]`` whole numbers from 0 on, one need per row.
        weights: ``[n]`` positive counts or shares; None: 1 each.

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
            Axis(name, 0, 0)  # checks the name
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"expected axes, each once, got {list(names)}: name them")
        self.points = _checked_points(self.names, points)
        self.weights = _checked_weights(len(self.points), weights)

    @property
    def total(self) -> float:
        """Sum of the weights: the number of steps if each has weight 1."""
        return float(self.weights.sum())

    @property
    def largest(self) -> dict[str, int]:
        """Largest size on each axis."""
        return dict(zip(self.names, self.points.max(axis=0).tolist(), strict=True))

    def histogram(self) -> Demand:
        """Return the distinct needs, sorted, with summed weights."""
        points, inverse = np.unique(self.points, axis=0, return_inverse=True)
        return Demand(self.names, points, np.bincount(inverse.reshape(-1), self.weights))

    def halves(self) -> tuple[Demand, Demand]:
        """Split in time into two halves of equal weight.

        Raises:
            ValueError: there is only one need.
        """
        if len(self) < 2:
            raise ValueError("expected two needs to halve a demand, got one: record more steps")
        middle = int(np.searchsorted(self.weights.cumsum(), self.total / 2))
        return self[: max(1, middle)], self[max(1, middle) :]

    def project(self, names: Sequence[str]) -> Demand:
        """Return the demand over some of its axes, in the given order.

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


def read_demand(path: str | os.PathLike[str]) -> Demand:
    """Read the needs of a file, in order.

    Each line is an object, ``{"need": {"tokens": 37, "blocks": 80}, "count": 2}``, or just the
    sizes, ``{"tokens": 37, "blocks": 80}``. Blank lines are skipped.

    Raises:
        DemandFileError: the file cannot be read, has no need, or has a bad line; the message has
            its number and the reason.
    """
    needs: list[list[int]] = []
    counts: list[float] = []
    names: tuple[str, ...] = ()
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    need, count = _row(line, names)
                except (TypeError, ValueError) as error:
                    problem = clipped(str(error), _REASON)
                    message = f"{path}:{number}: {problem}: {quoted(line.strip())}"
                    raise DemandFileError(message) from None
                names = names or tuple(need)
                needs.append([need[name] for name in names])
                counts.append(count)
    except (OSError, UnicodeDecodeError) as error:
        raise DemandFileError(f"{path}: not readable as a demand: {error}") from error
    if not needs:
        raise DemandFileError(f"{path}: has no need; expected JSON lines, one need a line")
    try:
        return Demand(names, np.array(needs, np.int64), counts)
    except (ValueError, OverflowError) as error:
        raise DemandFileError(f"{path}: {clipped(str(error), _REASON)}") from None


def _row(line: str, names: tuple[str, ...]) -> tuple[dict[str, int], float]:
    """The sizes of a line, over ``names`` if there are some, and its count."""
    row = parse_json(line)
    if not isinstance(row, dict) or not row:
        raise ValueError('expected sizes by axis, such as {"tokens": 37}, or {"need": {...}}')
    need, count = (row["need"], row.get("count", 1)) if "need" in row else (row, 1)
    if not isinstance(need, dict) or not need:
        raise ValueError('expected an object with "need": {axis: size, ...}')
    if names and set(need) != set(names):
        expected, got = (clipped(", ".join(each), 80) for each in (names, need))
        raise ValueError(
            f"expected the axes {expected} of the first need, got {got}: a file has one set of axes"
        )
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 < count < math.inf:
        raise ValueError(f"expected a positive count, got {count!r}")
    return {name: _size(name, size) for name, size in need.items()}, float(count)


def _size(name: str, size: Any) -> int:
    if isinstance(size, bool):
        raise TypeError(f"{name}={size!r} is not a whole number; sizes are ints")
    if (number := whole(name, size)) >= 2**63:
        raise ValueError(f"{name} is beyond 64 bits; sizes are below {2**63}")
    return number
