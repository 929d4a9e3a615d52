"""One space to plan: its demand, cost and limits, and the problem that these come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphs.buckets.axes import Axis
from graphs.planner.budget import Budget, Expense, Expenses
from graphs.planner.cells import CostOf, compress, jittered
from graphs.planner.choose import Problem
from graphs.planner.cost import CostModel, Floats
from graphs.planner.demand import Demand, Points
from graphs.planner.region import Region

__all__ = ["Part", "problem_of"]

_CELLS = 2500
_SIZES_OF_ONE_AXIS = 20_000
_CHECKED = 2000
_JITTER_SHARE = 0.25
_JITTER_SPREAD = 0.1


@dataclass(frozen=True)
class Part:
    """One of several spaces that share a budget.

    Args:
        demand: what is needed; its weights count against those of the other parts.
        cost: of a bucket, in the unit of the other parts. None: the product of its sizes.
        axes: the sizes of legal needs; an axis that is left out ends at the largest need.
        legal: which needs within the axes are legal, see `plan`.
        seconds: warmup seconds of a bucket, for a budget in seconds.
        bytes: of a bucket's graph, for a budget in bytes.
    """

    demand: Demand
    cost: CostModel | Callable[[Mapping[str, Any]], Any] | None = None
    axes: Sequence[Axis] = ()
    legal: Callable[[Mapping[str, Any]], Any] | None = None
    seconds: Expense | None = None
    bytes: Expense | None = None

    def model(self) -> CostModel:
        """The cost as a model."""
        if self.cost is None:
            return CostModel.product()
        return self.cost if isinstance(self.cost, CostModel) else CostModel(self.cost)

    def region(self) -> Region:
        """The legal needs; ValueError for an axis that the demand does not have."""
        names = self.demand.names
        given = {axis.name: axis for axis in self.axes}
        if unknown := [name for name in given if name not in names]:
            raise ValueError(
                f"expected axes of the demand ({', '.join(names)}), got "
                f"{', '.join(unknown)}: leave them out"
            )
        low, high = self.demand.points.min(axis=0), self.demand.points.max(axis=0)
        ends = zip(names, low.tolist(), high.tolist(), strict=True)
        return Region([given.get(name, Axis(name, *end)) for name, *end in ends], self.legal)


def problem_of(part: Part, budget: Budget, seed: int) -> Problem:
    """The needs of a part in cells, and the buckets that may be chosen for them.

    Raises:
        ValueError: a need outside the axes, a cost that is negative, zero for all, or falling.
    """
    region, model = part.region(), part.model()
    needs = part.demand.histogram()
    _check_inside(needs, region)

    def cost(points: Points) -> Floats:
        return model.of(region.names, points)

    points, weights, count = needs.points, needs.weights, _SIZES_OF_ONE_AXIS
    if len(region.names) > 1:
        count = _CELLS
        points, weights = jittered(
            points,
            weights,
            region.top,
            share=_JITTER_SHARE,
            spread=_JITTER_SPREAD,
            seed=seed,
            allows=region.allows,
        )
    _check_cost(needs.points[:: 1 + len(needs) // _CHECKED], cost, region.top)
    cells = compress(points, weights, cost, count)
    candidates = np.unique(np.concatenate([cells.corners, cells.joins]), axis=0)
    expenses = Expenses(region.names, budget, part.seconds, part.bytes)
    return Problem(cells, cost, region.top, expenses, candidates)


def _check_inside(needs: Demand, region: Region) -> None:
    outside = (needs.points > region.top).any(axis=1)
    if outside.any():
        need = dict(zip(needs.names, needs.points[int(outside.argmax())].tolist(), strict=True))
        limits = ", ".join(f"{axis.name} <= {axis.high}" for axis in region.axes)
        raise ValueError(f"expected needs with {limits}, got {need}: raise the axis")


def _check_cost(points: Points, cost: CostOf, top: Points) -> None:
    """Whether it rises, tried at each point: to the next size of each axis, and to the maximum."""
    own = cost(points)
    if not own.any():
        raise ValueError("expected needs that cost something, got a cost of 0: mend the cost")
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
                f"{tuple(above[at].tolist())}: mend the cost"
            )
