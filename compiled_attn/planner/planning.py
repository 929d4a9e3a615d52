"""`plan`: chooses the buckets with the least expected padding for a demand, a cost and a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compiled_attn.planner.cost import CostModel
from compiled_attn.planner.demand import Demand, Floats, Points
from compiled_attn.planner.first_fit import adapt
from compiled_attn.planner.fit import fit
from compiled_attn.planner.judge import PlanReport, judge
from compiled_attn.planner.pick import PickOrder, by_cost
from compiled_attn.planner.problem import Budget, Expense, Expenses, check_needs, problem_of
from compiled_attn.planner.region import Region
from graphs.buckets.axes import Axis, Bucket
from graphs.buckets.space import BucketSpace

__all__ = ["plan"]


def plan(
    demand: Demand,
    cost: CostModel | Callable[[Mapping[str, Any]], Any] | None = None,
    budget: Budget | int = 64,
    *,
    axes: Sequence[Axis] = (),
    legal: Callable[[Mapping[str, Any]], Any] | None = None,
    seconds: Expense | None = None,
    bytes: Expense | None = None,
    rho: float | None = 3.0,
    order: PickOrder = by_cost,
    seed: int = 0,
) -> PlanReport:
    """Choose the buckets within a budget that waste least on a demand.

    On one axis, counted in graphs, the choice is exact. On several it is near-optimal: needs are
    grouped into cells, perturbed copies are added, and buckets are chosen greedily by their saving
    and then swapped. A guard ensures that no legal need, expected or not, pays more than ``rho``
    times its own cost. The guard takes at most a quarter of the budget; where that is not enough
    for ``rho``, it takes a sixth and what the demand has no use for, and `PlanReport.guard` is the
    multiple that it reaches. The maximum is always a bucket. Equal arguments give equal plans.

    Args:
        demand: what steps need.
        cost: of a bucket: a model, or a formula over sizes by axis, see `CostModel`. None: the
            product of the sizes. It must not fall where a size grows.
        budget: what may be captured; a number is a number of graphs.
        axes: ranges of legal needs; their ends make the maximum. An axis that is not given ends at
            the largest need.
        legal: which needs within the axes can occur, for the guard; takes sizes by axis, numbers or
            arrays of them: ``lambda need: need["blocks"] >= need["sequences"]``.
        seconds: warmup seconds of a bucket, for a budget in seconds; must not fall either.
        bytes: of a bucket's graph, for a budget in bytes; must not fall either.
        rho: the guard's multiple; None: no guard.
        order: how the engine picks among buckets: `by_cost` or `by_size`.
        seed: of the perturbed copies.

    Raises:
        ValueError: axes that do not match the demand, a need outside them, ``rho`` of 1 or less, a
            budget too small for the maximum, a cost that is negative, zero for all, or falling.

    Example::

        report = plan(demand, lambda need: need["tokens"] * (500 + need["blocks"]), budget=16)
        space = report.space
        print(report)
    """
    if rho is not None and not 1 < rho < math.inf:
        raise ValueError(f"expected rho above 1, or None for no guard, got {rho}: 3 is usual")
    limits = budget if isinstance(budget, Budget) else Budget(graphs=budget)
    model = CostModel.of_any(cost)
    region = Region.of(demand, axes, legal)
    expenses = Expenses(region.names, limits, seconds, bytes)

    def cost_of(points: Points) -> Floats:
        return model.of(region.names, points)

    needs = demand.histogram()
    check_needs(needs, region, cost_of)
    problem = problem_of(needs, region, cost_of, expenses, seed)
    buckets = fit(problem, region, limits, rho)
    if order is not by_cost:
        buckets = adapt(problem, buckets, order)
    space = _space(region.axes, buckets, model)
    judged = judge(space, demand, model, order)
    return PlanReport(
        space=space,
        cost=model,
        waste=judged.waste,
        guard=region.worst(buckets, cost_of, order),
        rho=rho,
        uses=judged.uses,
        seconds=_sum(seconds, space),
        bytes=_sum(bytes, space),
        order=order,
    )


def _space(axes: Sequence[Axis], buckets: Points, cost: CostModel) -> BucketSpace:
    names = tuple(axis.name for axis in axes)
    lows = np.minimum([axis.low for axis in axes], buckets.min(axis=0)).tolist()
    ranges = [replace(axis, low=low) for axis, low in zip(axes, lows, strict=True)]
    return BucketSpace(ranges, [Bucket.of(names, tuple(row)) for row in buckets.tolist()], cost)


def _sum(expense: Expense | None, space: BucketSpace) -> float | None:
    return None if expense is None else float(sum(expense(bucket) for bucket in space))
