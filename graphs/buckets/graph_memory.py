"""Memory of graphs that are not captured yet, predicted from the measured growth of a few."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from graphs.buckets.space import Bucket

__all__ = ["GraphMemory", "sample"]

Size: TypeAlias = Callable[[Mapping[str, int]], float]

_LEAST = 3


@dataclass(frozen=True)
class GraphMemory:
    """Bytes of captured graphs: ``fixed + per_unit * size`` each, and a pool that all share.

    Graphs that share a memory pool are captured largest first: the first one grows the pool to what
    it needs, and the others find room in it. So the largest measured graph gives the pool, and the
    others give the line. Where graphs share nothing, the largest is on the line too, and the pool
    is near 0.

    Args:
        fixed, per_unit: of each graph.
        shared: pool of the largest measured graph, which grows in proportion to the largest size.
        largest: its size.
        error: largest relative error among the measurements that gave the line.
        size: of a bucket.
    """

    fixed: float
    per_unit: float
    shared: float
    largest: float
    error: float
    size: Size

    @classmethod
    def fitted(
        cls, measured: Iterable[tuple[Mapping[str, int], int]], size: Size | None = None
    ) -> GraphMemory:
        """Fit the line, with coefficients from 0 on, of least relative error.

        Args:
            measured: buckets, and the growth of memory in bytes that the capture of each measured;
                see `sample` for which to capture. Order does not matter.
            size: of a bucket; None: the product of its sizes, each at least 1.

        Raises:
            ValueError: fewer than three different sizes, or a growth that is negative or 0 for all.
        """
        size = size or _product
        points = sorted((float(size(bucket)), float(grown)) for bucket, grown in measured)
        if len({at for at, _ in points}) < _LEAST or min(grown for _, grown in points) < 0:
            raise ValueError(
                f"expected the bytes, from 0 on, of captures of {_LEAST} sizes, got "
                f"{[(at, grown) for at, grown in points]}: capture the smallest, a middle and the "
                "largest bucket"
            )
        (largest, whole), rest = points[-1], points[:-1]
        if not any(grown for _, grown in points):
            raise ValueError("expected captures that take memory, got 0 bytes: measure again")
        fixed, per_unit = _line(rest)
        errors = (abs(fixed + per_unit * at - grown) / max(grown, 1.0) for at, grown in rest)
        shared = max(0.0, whole - fixed - per_unit * largest)
        return cls(fixed, per_unit, shared, largest, max(errors), size)

    def of(self, bucket: Mapping[str, int]) -> float:
        """Return the bytes of one more graph, without the pool."""
        return self.fixed + self.per_unit * self.size(bucket)

    def total(self, buckets: Iterable[Mapping[str, int]]) -> float:
        """Return the bytes of all these graphs with their pool; 0 if there are none."""
        sizes = [self.size(bucket) for bucket in buckets]
        if not sizes:
            return 0.0
        pool = self.shared * max(sizes) / self.largest
        return pool + self.fixed * len(sizes) + self.per_unit * sum(sizes)

    def __str__(self) -> str:
        return (
            f"{_bytes(self.fixed)} a graph, {self.per_unit:.1f} bytes a unit of size, "
            f"{_bytes(self.shared)} shared; error of the fit {self.error:.0%}"
        )


def sample(
    buckets: Sequence[Bucket], count: int = _LEAST, size: Size | None = None
) -> list[Bucket]:
    """Return the buckets to capture for `GraphMemory.fitted`, the largest first.

    Their sizes are spread evenly from the largest to the smallest.

    Raises:
        ValueError: there are fewer buckets, or ``count`` is below three.
    """
    if not _LEAST <= count <= len(buckets):
        raise ValueError(
            f"expected {_LEAST} to {len(buckets)} captures of {len(buckets)} buckets, got {count}"
        )
    ordered = sorted(buckets, key=size or _product, reverse=True)
    most, least = ((size or _product)(ordered[at]) for at in (0, -1))
    chosen = [ordered[0]]
    for number in range(1, count - 1):
        aim = most + (least - most) * number / (count - 1)
        left = [bucket for bucket in ordered[1:-1] if bucket not in chosen]
        chosen.append(min(left, key=lambda bucket: abs((size or _product)(bucket) - aim)))
    return [*chosen, ordered[-1]]


def _product(bucket: Mapping[str, int]) -> float:
    return math.prod(size or 1 for size in bucket.values())


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope from 0 on, of least squared relative error."""
    typical = sum(grown for _, grown in points) / len(points)
    if not typical:
        return 0.0, 0.0
    # A growth of 0, memory that was free before, must not weigh infinitely.
    weights = [1 / max(grown, typical / 100) for _, grown in points]
    ones = weights
    sizes = [weight * at for weight, (at, _) in zip(weights, points, strict=True)]
    aims = [weight * grown for weight, (_, grown) in zip(weights, points, strict=True)]
    oo, os, ss = _dot(ones, ones), _dot(ones, sizes), _dot(sizes, sizes)
    oa, sa = _dot(ones, aims), _dot(sizes, aims)
    determinant = oo * ss - os * os
    if determinant > 1e-12 * oo * ss:
        fixed, per_unit = (oa * ss - sa * os) / determinant, (sa * oo - oa * os) / determinant
        if fixed >= 0 and per_unit >= 0:
            return fixed, per_unit
        if fixed < 0:
            return 0.0, sa / ss
    return oa / oo, 0.0


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _bytes(number: float) -> str:
    return f"{number / 2**20:.2f} MiB" if number >= 2**20 else f"{number / 2**10:.1f} KiB"
