"""A planning problem: needs in cells, their cost, the budget, and the buckets to choose among."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from compiled_attn.planner.cells import Cells, CostOf, compress, jittered
from compiled_attn.planner.cost import CostModel
from compiled_attn.planner.demand import Demand, Floats, Points
from compiled_attn.planner.region import Region
from graphs.buckets.axes import Axis

__all__ = [
    "Budget",
    "Expense",
    "Expenses",
    "Problem",
    "check_needs",
    "mixtures_of",
    "problem_of",
    "region_of",
]

Expense: TypeAlias = Callable[[Mapping[str, int]], float]

_CELLS = 2500
_SIZES_OF_ONE_AXIS = 20_000
_CHECKED = 2000


@dataclass(frozen=True)
class Problem:
    """Needs to be served, and what they can be served from.

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


def region_of(
    demand: Demand, axes: Sequence[Axis], legal: Callable[[Mapping[str, Any]], Any] | None
) -> Region:
    """The legal needs of a demand; ValueError for an axis that it does not have."""
    names = demand.names
    given = {axis.name: axis for axis in axes}
    if unknown := [name for name in given if name not in names]:
        raise ValueError(
            f"expected axes of the demand ({', '.join(names)}), got {', '.join(unknown)}: "
            "leave them out"
        )
    low, high = demand.points.min(axis=0), demand.points.max(axis=0)
    ends = zip(names, low.tolist(), high.tolist(), strict=True)
    return Region([given.get(name, Axis(name, *end)) for name, *end in ends], legal)


def problem_of(
    demand: Demand, region: Region, model: CostModel, expenses: Expenses, seed: int
) -> Problem:
    """The needs of a demand in cells, and the buckets that may be chosen for them."""
    needs = demand.histogram()
    return _problem(needs.points, needs.weights, region, model, expenses, seed)


def mixtures_of(
    points: Points,
    weights: Floats,
    region: Region,
    model: CostModel,
    expenses: Expenses,
    seed: int,
) -> Callable[[Floats], Problem]:
    """The problem of any mixture of demands, given the share ``[demands]`` of each.

    The cells are the same for all mixtures, so they are made once.

    Args:
        points: ``[n, axes]`` distinct needs.
        weights: ``[demands, n]``.
        region, model, expenses, seed: see `problem_of`.
    """
    each = _problem(points, weights, region, model, expenses, seed)
    return lambda shares: replace(each, cells=each.cells.mixed(shares))


def _problem(
    points: Points, weights: Floats, region: Region, model: CostModel, expenses: Expenses, seed: int
) -> Problem:
    def cost(some: Points) -> Floats:
        return model.of(region.names, some)

    count = _SIZES_OF_ONE_AXIS
    if len(region.names) > 1:
        count = _CELLS
        points, weights = jittered(points, weights, region.top, seed=seed, allows=region.allows)
    cells = compress(points, weights, cost, count)
    candidates = np.unique(np.concatenate([cells.corners, cells.joins]), axis=0)
    return Problem(cells, cost, region.top, expenses, candidates)


def check_needs(needs: Demand, region: Region, model: CostModel) -> None:
    """Raises ValueError: a need outside the axes, a cost that is negative, 0 for all, or falling.

    Args:
        needs: each once.
        region: the axes.
        model: the cost.
    """
    outside = (needs.points > region.top).any(axis=1)
    if outside.any():
        need = dict(zip(needs.names, needs.points[int(outside.argmax())].tolist(), strict=True))
        limits = ", ".join(f"{axis.name} <= {axis.high}" for axis in region.axes)
        raise ValueError(f"expected needs with {limits}, got {need}: raise the axis")
    some = needs.points[:: 1 + len(needs) // _CHECKED]
    _check_cost(some, lambda points: model.of(region.names, points), region.top)


def _check_cost(points: Points, cost: CostOf, top: Points) -> None:
    """Whether it rises, tried at each point: to the next size of each axis, and to the maximum."""
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
        graphs: buckets.
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
    """What buckets take of a budget: for each, one share per limit.

    Args:
        names: the axes.
        budget: the limits.
        seconds: warmup seconds of a bucket.
        bytes: bytes of a bucket's graph.

    Raises:
        ValueError: a limit on seconds or bytes without the function that says what a bucket takes.
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
                    f"expected a function {name}=bucket -> {name} beside a budget in {name}, got "
                    "none: pass one, fitted to a warmup for example"
                )
            self._models.append((CostModel.of_any(expense), float(limit)))

    def of(self, points: Points) -> Floats:
        """Shares of the limits that buckets take: ``[n, limits]``."""
        shares = [model.of(self._names, points) / limit for model, limit in self._models]
        return np.stack(shares, axis=1)
