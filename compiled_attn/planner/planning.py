"""`plan`: the buckets with the least expected padding, of a demand, a cost and a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compiled_attn.planner.bound import lower_bound
from compiled_attn.planner.cost import CostModel
from compiled_attn.planner.demand import Demand, Points
from compiled_attn.planner.drift import DriftReport, PickOrder, Trial, by_cost
from compiled_attn.planner.judge import PlanReport, judge
from compiled_attn.planner.one_axis import best_buckets
from compiled_attn.planner.problem import (
    Budget,
    Expense,
    Expenses,
    check_needs,
    mixtures_of,
    problem_of,
    region_of,
)
from compiled_attn.planner.robust import (
    Task,
    fitting_ladders,
    planned,
    robust,
    sizes_of,
    usual_ladders,
)
from compiled_attn.planner.scenarios import rare_kinds, scenarios_of
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
    drift: bool = False,
    ladders: Mapping[str, BucketSpace] | None = None,
    order: PickOrder = by_cost,
    seed: int = 0,
) -> PlanReport:
    """Choose the buckets within a budget that waste least on a demand.

    On one axis, counted in graphs, the choice is exact. On several it is near-optimal: needs are
    grouped into cells, slightly disturbed copies are added, buckets are chosen lazily greedy by
    what they save and then swapped. A guard sees to it that no legal need, foreseen or not, pays
    more than ``rho`` times its own cost. It takes a quarter of the budget at most; where that does
    not suffice, a sixth and what the demand has no use for, for the least multiple that it finds:
    `PlanReport.guard` says which.
    The maximum is always a bucket. The same arguments give the same plan.

    Args:
        demand: what steps need.
        cost: of a bucket: a model, or a formula over sizes by axis, see `CostModel`. None: the
            product of the sizes. It must not fall where a size grows.
        budget: what may be captured; a number stands for that many graphs.
        axes: the sizes of legal needs; the largest ones make the maximum. An axis that is left out
            ends at the largest need.
        legal: which needs within the axes can occur, for the guard; takes sizes by axis, numbers or
            arrays of them: ``lambda need: need["blocks"] >= need["sequences"]``.
        seconds: warmup seconds of a bucket, for a budget in seconds; never falling either.
        bytes: of a bucket's graph, for a budget in bytes; never falling either.
        rho: the guard's multiple; None: no guard.
        drift: plan for the worst of the demand and others near it, resampled and shifted, instead
            of for the demand alone: then `PlanReport.drift` says what the plan bears. It takes
            several times as long.
        ladders: by name, those that a plan for drift is measured against. Of those within the
            budget, the plan is on no demand near this one worse than the one whose worst waste is
            least. None: linear and exponential ladders.
        order: by which the engine picks among buckets that hold a need: `by_cost`, or `by_size`.
        seed: of the disturbed copies and the resampled demands.

    Raises:
        ValueError: axes that don't fit the demand, a need outside them, ``rho`` of 1 or less, a
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
    region = region_of(demand, axes, legal)
    expenses = Expenses(region.names, limits, seconds, bytes)

    task = Task(region, limits, rho, order, lambda p: model.of(region.names, p))
    check_needs(demand.histogram(), region, model)
    if drift:
        buckets, guards, borne = _for_drift(task, demand, model, expenses, ladders, seed)
    else:
        fit = planned(task, problem_of(demand, region, model, expenses, seed))
        buckets, guards, borne = fit.buckets, fit.guards, None
    space = _space(region.axes, buckets, model)
    judged = judge(space, demand, model, order)
    return PlanReport(
        space=space,
        cost=model,
        waste=judged.waste,
        lower_bound=_bound(demand, task, expenses, judged.waste),
        guard=region.worst(buckets, task.cost(buckets), task.cost, order(buckets, task.cost)),
        rho=rho,
        guards=guards,
        steps=demand.total,
        uses=judged.uses,
        seconds=_sum(seconds, space),
        bytes=_sum(bytes, space),
        order=order,
        drift=borne,
    )


def _for_drift(
    task: Task,
    demand: Demand,
    model: CostModel,
    expenses: Expenses,
    ladders: Mapping[str, BucketSpace] | None,
    seed: int,
) -> tuple[Points, int, DriftReport]:
    """The buckets, how many of them are the guard's, and what drift they bear."""
    region = task.region
    if ladders is None:
        sizes = usual_ladders(region, task.limits)
    else:
        sizes = {name: sizes_of(space, region.names) for name, space in ladders.items()}
    rivals = fitting_ladders(sizes, region, expenses)
    found = scenarios_of(demand, region, task.cost, seed)
    trial = Trial(found, task.cost, task.order)
    mixed = mixtures_of(found.points, found.weights, region, model, expenses, seed)
    buckets, guards = robust(task, mixed, trial, rivals)
    return buckets, guards, trial.report(buckets, rivals, rare_kinds(demand))


def _space(axes: Sequence[Axis], buckets: Points, cost: CostModel) -> BucketSpace:
    names = tuple(axis.name for axis in axes)
    lows = np.minimum([axis.low for axis in axes], buckets.min(axis=0)).tolist()
    ranges = [replace(axis, low=low) for axis, low in zip(axes, lows, strict=True)]
    return BucketSpace(ranges, [Bucket.of(names, tuple(row)) for row in buckets.tolist()], cost)


def _bound(demand: Demand, task: Task, expenses: Expenses, waste: float) -> float:
    """No buckets within the budget waste less; on one axis some do waste just as much."""
    needs, top, cost = demand.histogram(), task.region.top, task.cost
    points, weights = needs.points, needs.weights
    own = float(cost(points) @ weights)
    count = _most_buckets(expenses, top, points)
    if len(top) > 1:
        return lower_bound(points, weights, cost, top, count, own * (1 + waste)) / own - 1
    best = best_buckets(points, weights, cost, top, count)
    paid = cost(best)[np.searchsorted(best[:, 0], points[:, 0])] @ weights
    return float(paid) / own - 1


def _most_buckets(expenses: Expenses, top: Points, points: Points) -> int:
    """How many buckets the budget could hold, if all beside the maximum took the least."""
    left = 1.0 - expenses.of(top[None])[0]
    least = expenses.of(points).min(axis=0)
    some = least > 0
    most = float((left[some] / least[some]).min(initial=len(points)))
    return 1 + math.floor(most + 1e-9)


def _sum(expense: Expense | None, space: BucketSpace) -> float | None:
    return None if expense is None else float(sum(expense(bucket) for bucket in space))
