"""From a demand, a cost and a budget to the buckets with the least expected padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphs.buckets import BucketSpace
from graphs.planner.bound import lower_bound
from graphs.planner.budget import Budget, Expense, Expenses
from graphs.planner.cells import Cells, compress, jittered
from graphs.planner.choose import Problem, grow, improve, start
from graphs.planner.cost import CostModel, Floats
from graphs.planner.demand import Demand, Points
from graphs.planner.guard import guard
from graphs.planner.judge import judge
from graphs.planner.one_axis import best_sizes
from graphs.planner.region import Region
from graphs.planner.report import PlanReport
from graphs.points import Axis, Bucket

__all__ = ["Part", "plan", "plan_together"]

_CELLS = 2500
_SIZES_OF_ONE_AXIS = 20_000
_JITTER_SHARE = 0.25
_JITTER_SPREAD = 0.1
_GUARD_SHARE = 1 / 6
_GUARD_SHARE_AT_MOST = 1 / 4
_SLACK = 1e-9


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
    seed: int = 0,
) -> PlanReport:
    """Choose the buckets within a budget that waste least on a demand.

    On one axis the choice is exact. On several it is near-optimal: needs are grouped into cells,
    slightly disturbed copies are added, buckets are chosen lazily greedy by what they save and then
    swapped. A guard of at most a sixth of the budget sees to it that no legal need, foreseen or
    not, pays more than ``rho`` times its own cost. The maximum is always a bucket. The same
    arguments give the same plan.

    Args:
        demand: what steps need.
        cost: of a bucket: a model, or a formula over sizes by axis, see `CostModel`. None: the
            product of the sizes. It must not fall where a size grows.
        budget: what may be captured; a number stands for that many graphs.
        axes: the sizes of legal needs; the largest ones make the maximum. An axis that is left out
            ends at the largest need.
        legal: which needs within the axes can occur, for the guard; takes sizes by axis, numbers or
            arrays of them: ``lambda need: need["blocks"] >= need["sequences"]``.
        seconds: warmup seconds of a bucket, for a budget in seconds.
        bytes: of a bucket's graph, for a budget in bytes.
        rho: the guard's multiple; None: no guard.
        seed: of the disturbed copies.

    Raises:
        ValueError: axes that don't fit the demand, a need outside them, ``rho`` of 1 or less, a
            budget too small for the maximum, a cost that is negative, zero for all, or falling.

    Example::

        report = plan(demand, lambda need: need["tokens"] * (500 + need["blocks"]), budget=16)
        space = report.space
        print(report)
    """
    part = Part(demand, cost, axes, legal, seconds, bytes)
    return _plan(part, _as_budget(budget), rho, seed)


def plan_together(
    parts: Mapping[str, Part], budget: Budget | int = 64, *, rho: float | None = 3.0, seed: int = 0
) -> dict[str, PlanReport]:
    """Plan several spaces, for example of prefill and decode, under one budget.

    The budget goes where it saves most: first lazily greedy over all parts at once, then each part
    is planned as by `plan` with what it got.

    Raises:
        ValueError: no part, or what `plan` raises.
    """
    if not parts:
        raise ValueError("expected at least one part, got none: name the spaces to plan")
    whole = _as_budget(budget)
    problems = [_problem(part, whole, seed) for part in parts.values()]
    servings = [start(problem) for problem in problems]
    spent = [p.expenses.of(p.top[None])[0] for p in problems]
    left = _left(np.ones(len(spent[0])) - sum(spent), whole)
    grow(problems, servings, left)
    shares = [
        problem.expenses.of(serving.buckets).sum(axis=0)
        for problem, serving in zip(problems, servings, strict=True)
    ]
    return {
        name: _plan(part, _cut(whole, share), rho, seed)
        for (name, part), share in zip(parts.items(), shares, strict=True)
    }


def _plan(part: Part, budget: Budget, rho: float | None, seed: int) -> PlanReport:
    if rho is not None and not 1 < rho < math.inf:
        raise ValueError(f"expected rho above 1, or None for no guard, got {rho}: 3 is usual")
    problem = _problem(part, budget, seed)
    cost, region = _cost(part), _region(part)
    if rho is None:
        buckets = _filled(problem, _fitted(problem, budget, 0.0))
        added = 0
    else:
        buckets, added = _guarded(problem, region, budget, rho)
    return _report(part, budget, problem, region, cost, buckets, rho, added)


def _report(
    part: Part,
    budget: Budget,
    problem: Problem,
    region: Region,
    cost: CostModel,
    buckets: Points,
    rho: float | None,
    guards: int,
) -> PlanReport:
    names = region.names
    axes = [
        Axis(a.name, min(a.low, int(buckets[:, at].min())), a.high)
        for at, a in enumerate(region.axes)
    ]
    space = BucketSpace(axes, [Bucket.of(names, tuple(row)) for row in buckets.tolist()], cost)
    judged = judge(space, part.demand, cost)
    sizes = np.array([bucket.sizes for bucket in space], np.int64)
    return PlanReport(
        space=space,
        cost=cost,
        waste=judged.waste,
        lower_bound=_bound(part, problem, budget, judged.waste),
        guard=region.worst(sizes, cost.of(names, sizes), problem.cost),
        rho=rho,
        guards=guards,
        steps=part.demand.total,
        uses=judged.uses,
        seconds=_sum(part.seconds, space),
        bytes=_sum(part.bytes, space),
    )


def _problem(part: Part, budget: Budget, seed: int) -> Problem:
    region, cost = _region(part), _cost(part)
    names = region.names
    needs = part.demand.project(names).histogram()
    _check_inside(needs, region)

    def cost_of(points: Points) -> Floats:
        return cost.of(names, points)

    points, weights = needs.points, needs.weights
    if len(names) > 1:
        points, weights = jittered(
            points,
            weights,
            region.top,
            share=_JITTER_SHARE,
            spread=_JITTER_SPREAD,
            seed=seed,
        )
    cells = compress(points, weights, cost_of, _CELLS if len(names) > 1 else _SIZES_OF_ONE_AXIS)
    _check_cost(cells, cost_of, region)
    candidates = np.unique(np.concatenate([cells.corners, cells.joins]), axis=0)
    expenses = Expenses(names, budget, part.seconds, part.bytes)
    return Problem(cells, cost_of, region.top, expenses, candidates)


def _region(part: Part) -> Region:
    given = {axis.name: axis for axis in part.axes}
    if unknown := [name for name in given if name not in part.demand.names]:
        raise ValueError(
            f"expected axes of the demand ({', '.join(part.demand.names)}), got "
            f"{', '.join(unknown)}: leave them out"
        )
    largest = part.demand.largest
    lowest = dict(zip(part.demand.names, part.demand.points.min(axis=0).tolist(), strict=True))
    axes = [given.get(name, Axis(name, lowest[name], largest[name])) for name in part.demand.names]
    return Region(axes, part.legal)


def _cost(part: Part) -> CostModel:
    if part.cost is None:
        return CostModel.product()
    return part.cost if isinstance(part.cost, CostModel) else CostModel(part.cost)


def _as_budget(budget: Budget | int) -> Budget:
    return budget if isinstance(budget, Budget) else Budget(graphs=budget)


def _check_inside(needs: Demand, region: Region) -> None:
    outside = (needs.points > region.top).any(axis=1)
    if outside.any():
        need = dict(zip(needs.names, needs.points[int(outside.argmax())].tolist(), strict=True))
        limits = ", ".join(f"{axis.name} <= {axis.high}" for axis in region.axes)
        raise ValueError(f"expected needs with {limits}, got {need}: raise the axis")


def _check_cost(cells: Cells, cost: Any, region: Region) -> None:
    own, top = cost(cells.corners), float(cost(region.top[None])[0])
    if not own.any():
        raise ValueError("expected needs that cost something, got a cost of 0: mend the cost")
    if own.max() > top * (1 + 1e-9):
        raise ValueError(
            f"expected a cost that never falls where a size grows, got {own.max():g} for a need "
            f"and {top:g} for the maximum: mend the cost"
        )


def _left(left: Floats, budget: Budget) -> Floats:
    if (left < -1e-9).any():
        raise ValueError(
            f"expected a budget with room for the maximum of each space, got {budget}: raise it"
        )
    return left


def _guarded(problem: Problem, region: Region, budget: Budget, rho: float) -> tuple[Points, int]:
    """Fitted buckets and those of the guard, and how many the latter are.

    The guard is laid over what is fitted, so it comes second, and what it leaves of the budget is
    fitted once more. It gets a quarter where that keeps the promise, or else a sixth.
    """
    buckets = _fitted(problem, budget, _GUARD_SHARE_AT_MOST)
    added, reached = _guard(problem, region, buckets, rho, budget, _GUARD_SHARE_AT_MOST)
    if reached > rho:
        added, reached = _guard(problem, region, buckets, rho, budget, _GUARD_SHARE)
    share = float(problem.expenses.of(added).sum(axis=0).max(initial=0.0))
    again = _fitted(problem, budget, share)
    kept, reached_again = _guard(problem, region, again, reached, budget, share)
    if reached_again <= reached:
        buckets, added = again, kept
    return _filled(problem, np.concatenate([buckets, added])), len(added)


def _guard(
    problem: Problem, region: Region, buckets: Points, rho: float, budget: Budget, share: float
) -> tuple[Points, float]:
    """As many buckets of a guard as a share of the budget has room for, and what they promise."""
    left = 1.0 - problem.expenses.of(buckets).sum(axis=0)
    limits = [_graphs(budget, share)]
    if not problem.expenses.counts_only:
        limits = [n for n in (64, 32, 16, 8, 4, 2, 1) if budget.graphs is None or n <= limits[0]]
    for most in [*limits, 0]:
        added, reached = guard(region, problem.cost, buckets, rho, most)
        if (problem.expenses.of(added).sum(axis=0) <= left + _SLACK).all():
            break
    return added, reached


def _graphs(budget: Budget, share: float) -> int:
    return 0 if budget.graphs is None else int(budget.graphs * share + _SLACK)


def _fitted(problem: Problem, budget: Budget, reserve: float) -> Points:
    """Buckets for the demand, with a share of the budget left over."""
    if problem.top.shape == (1,) and problem.expenses.counts_only:
        count = _graphs(budget, 1.0) - _graphs(budget, reserve)
        return _exact(problem, count)
    return _near_optimal(problem, budget, reserve)


def _exact(problem: Problem, count: int) -> Points:
    sizes = np.unique(np.append(problem.cells.corners[:, 0], problem.top))
    weights = np.zeros(len(sizes))
    weights[np.searchsorted(sizes, problem.cells.corners[:, 0])] = problem.cells.weights
    taken = best_sizes(problem.cost(sizes[:, None]), weights, count)
    return np.asarray(sizes[taken[::-1]][:, None])


def _near_optimal(problem: Problem, budget: Budget, reserve: float) -> Points:
    serving = start(problem)
    spent = problem.expenses.of(problem.top[None])[0]
    left = _left(1.0 - spent, budget)
    kept = np.full(len(left), reserve)
    if budget.graphs is not None:
        kept[0] = _graphs(budget, reserve) / budget.graphs
    kept = np.minimum(kept, left)
    free = grow([problem], [serving], left - kept)
    improve(problem, serving, free)
    return serving.buckets


def _filled(problem: Problem, buckets: Points) -> Points:
    """What is left of the budget goes to buckets that save more."""
    serving = start(problem, buckets[1:])
    left = 1.0 - problem.expenses.of(buckets).sum(axis=0)
    grow([problem], [serving], left)
    return np.asarray(np.unique(serving.buckets, axis=0))


def _bound(part: Part, problem: Problem, budget: Budget, waste: float) -> float:
    needs = part.demand.histogram()
    cost = problem.cost
    points = part.demand.project(needs.names).histogram().points
    own = float(cost(points) @ needs.weights)
    least = problem.expenses.of(points).max(axis=1).min()
    count = max(1, math.floor(1 / least + 1e-9)) if least > 0 else len(points)
    if len(needs.names) == 1:
        sizes = np.append(points[:, 0], problem.top[points[-1] < problem.top])
        weights = np.append(needs.weights, np.zeros(len(sizes) - len(points)))
        costs = cost(sizes[:, None])
        taken = best_sizes(costs, weights, count)
        paid = costs[taken][np.searchsorted(taken, np.arange(len(sizes)))] @ weights
        return float(paid) / own - 1
    reached = own * (1 + waste)
    return lower_bound(points, needs.weights, cost, problem.top, count, reached) / own - 1


def _cut(budget: Budget, share: Floats) -> Budget:
    """The part of a budget that is a share of each of its limits."""
    names = [n for n in ("graphs", "seconds", "bytes") if getattr(budget, n) is not None]
    limits = dict(zip(names, share.tolist(), strict=True))
    cut = {name: getattr(budget, name) * limits[name] for name in names}
    if "graphs" in cut:
        cut["graphs"] = round(cut["graphs"])
    return replace(budget, **cut)


def _sum(expense: Expense | None, space: BucketSpace) -> float | None:
    return None if expense is None else float(sum(expense(bucket) for bucket in space))
