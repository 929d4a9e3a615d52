"""A planning problem: needs in cells, their cost, the budget and the candidate buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from compiled_attn.planner.cells import Cells, compress, jitter
from compiled_attn.planner.cost import CostModel
from compiled_attn.planner.demand import Demand, Floats, Points
from compiled_attn.planner.pick import CostOf
from compiled_attn.planner.region import Region

__all__ = ["Budget", "Expense", "Expenses", "Problem", "check_needs", "problem_of"]

Expense: TypeAlias = Callable[[Mapping[str, int]], float]

_CELLS = 2500
_SIZES_OF_ONE_AXIS = 20_000
_CHECKED = 2000


@dataclass(frozen=True)
class Problem:
    """Needs to be served, and the buckets that may serve them.

    Args:
        cells: the needs.
        cost: of points.
        top: ``[axes]`` the maximum, always a bucket.
        expenses: what buckets take of the budget.
        candidates: ``[m, axes]``.
    """

    cells: Cells
    cost: CostOf
    top: Points
    expenses: Expenses
    candidates: Points


def problem_of(
    needs: Demand, region: Region, cost: CostOf, expenses: Expenses, seed: int
) -> Problem:
    """Group distinct needs into cells, and collect the candidate buckets for them."""
    points, weights, count = needs.points, needs.weights, _SIZES_OF_ONE_AXIS
    if len(region.names) > 1:
        count = _CELLS
        points, weights = jitter(points, weights, region.top, seed=seed, allows=region.allows)
    cells = compress(points, weights, cost, count)
    candidates = np.unique(np.concatenate([cells.corners, cells.joins]), axis=0)
    return Problem(cells, cost, region.top, expenses, candidates)


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


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits of what a plan captures; None: no limit.

    Args:
        graphs: number of buckets.
        seconds: of warmup, summed over buckets.
        bytes: of captured graphs, summed over buckets.

    Raises:
        ValueError: nothing is limited, or a limit is not positive.
    """

    graphs: int | None = None
    seconds: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        limits = {n: getattr(self, n) for n in ("graphs", "seconds", "bytes")}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if not given:
            raise ValueError("expected a limit, got none: set graphs, seconds or bytes")
        for name, limit in given.items():
            if not 0 < limit < math.inf or (name == "graphs" and limit != int(limit)):
                raise ValueError(f"expected {name} above 0, got {limit}: raise it, or leave it out")


class Expenses:
    """What buckets over the axes ``names`` take of a budget: one share per limit.

    Raises:
        ValueError: a limit on seconds or bytes without the function that measures a bucket.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        budget: Budget,
        seconds: Expense | None = None,
        bytes: Expense | None = None,
    ) -> None:
        self.counts_only = budget.seconds is None and budget.bytes is None
        self._names = names
        self._models: list[tuple[CostModel, float]] = []
        for name, limit, expense in (
            ("graphs", budget.graphs, lambda bucket: 1.0),
            ("seconds", budget.seconds, seconds),
            ("bytes", budget.bytes, bytes),
        ):
            if limit is None:
                continue
            if expense is None:
                raise ValueError(
                    f"expected a function {name}=bucket -> {name} with a budget in {name}, got "
                    "none: pass one, fitted to a warmup for example"
                )
            self._models.append((CostModel.of_any(expense), float(limit)))

    def of(self, points: Points) -> Floats:
        """Return the shares of the limits that buckets take: ``[n, limits]``."""
        shares = [model.of(self._names, points) / limit for model, limit in self._models]
        return np.stack(shares, axis=1)
