"""Plans by trying everything, for demands so small that this works."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from compiled_attn.planner import Demand, PlanReport
from graphs import Axis, Bucket

Cost = Callable[[dict[str, int]], float]


def paid(demand: Demand, buckets: Sequence[tuple[int, ...]], cost: Cost) -> float:
    """What all needs pay, each for the cheapest bucket that holds it."""
    prices = {bucket: cost(dict(zip(demand.names, bucket, strict=True))) for bucket in buckets}
    total = 0.0
    for need, weight in zip(demand.points.tolist(), demand.weights.tolist(), strict=True):
        holding = [b for b in buckets if all(x >= y for x, y in zip(b, need, strict=True))]
        total += weight * min(prices[b] for b in holding)
    return total


def waste(demand: Demand, buckets: Sequence[tuple[int, ...]], cost: Cost) -> float:
    """Paid over the needs' own cost, less 1."""
    own = paid(demand, [tuple(point) for point in demand.points.tolist()], cost)
    return paid(demand, buckets, cost) / own - 1


def least_waste(
    demand: Demand,
    top: tuple[int, ...],
    cost: Cost,
    fits: Callable[[Sequence[tuple[int, ...]]], bool],
    most: int,
) -> float:
    """The least waste of any set of at most ``most`` buckets with ``top`` that ``fits``."""
    sizes = [sorted({*column}) for column in zip(*demand.points.tolist(), strict=True)]
    others = [bucket for bucket in itertools.product(*sizes) if bucket != top]
    best = waste(demand, [top], cost) if fits([top]) else float("inf")
    for count in range(1, most):
        for chosen in itertools.combinations(others, count):
            if fits([top, *chosen]):
                best = min(best, waste(demand, [top, *chosen], cost))
    return best


def every_need(axes: Sequence[Axis], legal: Callable[[Bucket], bool]) -> Iterator[Bucket]:
    """Every legal need."""
    names = tuple(axis.name for axis in axes)
    for point in itertools.product(*(range(axis.low, axis.high + 1) for axis in axes)):
        if legal(need := Bucket.of(names, point)):
            yield need


def figures(report: PlanReport) -> dict[str, Any]:
    """All that a plan says, so that two can be compared: cost models have no equality."""
    return {**vars(report), "cost": None, "space": tuple(report.space)}
