"""`plan`: chooses the buckets with the least expected padding for a demand, a cost and a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from compiled_attn.planner.cells import Problem
from compiled_attn.planner.cost import CostModel
from compiled_attn.planner.demand import Demand, Floats, Points
from compiled_attn.planner.fit import adapt, fit
from compiled_attn.planner.judge import PlanReport, judge
from compiled_attn.planner.pick import CostOf, PickOrder, by_cost
from compiled_attn.planner.region import Region
from graphs.buckets.graph_memory import GraphMemory
from graphs.buckets.space import Axis, Bucket, BucketSpace

__all__ = ["Budget", "plan"]

Expense: TypeAlias = Callable[[Mapping[str, int]], float]

_MOST_GRAPHS = 512  # of a budget without a number of graphs
_CHECKED = 2000  # needs


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits of what a plan captures; None: no limit.

    Args:
        graphs: number of buckets.
        seconds: of warmup, summed over buckets.
        bytes: of memory of the captured graphs.

    Raises:
        ValueError: nothing is limited, or a limit is not positive.
    """

    graphs: int | None = None
    seconds: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        limits = {"graphs": self.graphs, "seconds": self.seconds, "bytes": self.bytes}
        if not any(limit is not None for limit in limits.values()):
            raise ValueError("expected a limit, got none: set graphs, seconds or bytes")
        for name, limit in limits.items():
            if limit is not None and (
                not 0 < limit < math.inf or (name == "graphs" and limit != int(limit))
            ):
                raise ValueError(f"expected {name} above 0, got {limit}: raise it, or leave it out")


def plan(
    demand: Demand,
    cost: CostModel | Callable[[Mapping[str, Any]], Any] | None = None,
    budget: Budget | int = 64,
    *,
    axes: Sequence[Axis] = (),
    legal: Callable[[Mapping[str, Any]], Any] | None = None,
    seconds: Expense | None = None,
    bytes: Expense | GraphMemory | None = None,
    rho: float | None = 3.0,
    order: PickOrder = by_cost,
    ladder: BucketSpace | None = None,
    unseen: Demand | None = None,
    seed: int = 0,
) -> PlanReport:
    """Choose the buckets within a budget that waste least on a demand.

    On one axis, without a guard, the choice is exact up to 2,500 distinct sizes. On several axes it
    is near-optimal: needs are grouped into cells, perturbed copies are added, and buckets are
    chosen greedily by their saving and then swapped. A guard ensures that no legal need, expected
    or not, pays more than ``rho`` times its own cost. The guard takes at most a quarter of the
    budget; where that is not enough for ``rho``, it takes a sixth and what the demand has no use
    for, and `PlanReport.guard` is the multiple that it reaches. The maximum is always a bucket.
    Equal arguments give equal plans.

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
        bytes: memory of a bucket's graph, for a budget in bytes, likewise; or a `GraphMemory`,
            fitted to the captures of three buckets, which also knows what graphs share.
        rho: the guard's multiple; None: no guard.
        order: how the engine picks among buckets: `by_cost` or `by_size`.
        ladder: the engine's own buckets. They are returned, with the maximum, where they are within
            the budget and waste less than the chosen buckets: a plan is never worse.
        unseen: needs that decide between the two; None: the demand itself.
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
    needs = demand.histogram()

    def cost_of(points: Points) -> Floats:
        return model.of(region.names, points)

    expenses = _expenses(region.names, limits, seconds, bytes)

    def choose(count: int) -> Points:
        buckets = fit(problem, region, count, rho)
        return buckets if order is by_cost else adapt(problem, buckets, order, count)

    def is_affordable(points: Points) -> bool:
        if len(points) > (limits.graphs or _MOST_GRAPHS):
            return False
        return all(each.is_affordable(points) for each in expenses)

    def report(buckets: Points, *, is_ladder: bool = False) -> PlanReport:
        space = _space(region.axes, buckets, model)
        judged = judge(space, demand, model, order)
        guard = region.worst(buckets, cost_of, order)
        spent = {each.name: each.total(buckets) for each in expenses}
        return PlanReport(
            space,
            model,
            judged.waste,
            guard,
            rho,
            judged.uses,
            spent.get("seconds"),
            spent.get("bytes"),
            order,
            is_ladder,
        )

    _check_needs(needs, region, cost_of)
    problem = Problem.of(needs, region, cost_of, seed)
    if not is_affordable(region.top[None]):
        raise ValueError(f"expected a budget with room for the maximum, got {limits}: raise it")
    high = limits.graphs or _MOST_GRAPHS
    limited = [each for each in expenses if each.limit is not None]
    high = min([high, *(each.most(problem.candidates) for each in limited)])
    chosen = report(_largest(choose, is_affordable, high, region.top[None]))
    if ladder is None:
        return chosen
    own = np.array([[bucket[name] for name in region.names] for bucket in ladder], np.int64)
    own = np.unique(np.concatenate([region.top[None], own]), axis=0)
    if not is_affordable(own):
        return chosen
    theirs = report(own, is_ladder=True)
    judging = demand if unseen is None else unseen
    is_better = theirs.judge(judging).waste < chosen.judge(judging).waste
    return theirs if is_better else chosen


class _Expense(NamedTuple):
    """What buckets take of something that may be limited, of what each takes and all share."""

    name: str
    limit: float | None
    names: tuple[str, ...]
    each: CostModel
    shared: float = 0.0

    def of(self, points: Points) -> Floats:
        return self.each.of(self.names, points)

    def total(self, points: Points) -> float:
        return self.shared + float(self.of(points).sum())

    def is_affordable(self, points: Points) -> bool:
        return self.limit is None or self.total(points) <= self.limit * (1 + 1e-9)

    def most(self, candidates: Points) -> int:
        """How many buckets are affordable at most: all take at least as much as the cheapest."""
        least = float(self.of(candidates).min())
        return max(1, int((self.limit or 0.0) / max(least, 1e-9)))


def _expenses(
    names: tuple[str, ...],
    limits: Budget,
    seconds: Expense | None,
    memory: Expense | GraphMemory | None,
) -> list[_Expense]:
    """The expenses that are known.

    Raises:
        ValueError: one is limited and not known.
    """
    found = []
    for name, limit, each in (
        ("seconds", limits.seconds, seconds),
        ("bytes", limits.bytes, memory),
    ):
        if isinstance(each, GraphMemory):
            found.append(_Expense(name, limit, names, CostModel(each.of), each.shared))
        elif each is not None:
            found.append(_Expense(name, limit, names, CostModel.of_any(each)))
        elif limit is not None:
            raise ValueError(
                f"expected a function {name}=bucket -> {name} with a budget in {name}, got none: "
                "pass one, fitted to a warmup for example"
            )
    return found


def _largest(
    choose: Callable[[int], Points],
    is_affordable: Callable[[Points], bool],
    high: int,
    least: Points,
) -> Points:
    """The plan of the most buckets that the budget affords, ``least`` if no other."""
    best, low, count = least, 0, high
    while low < high:
        if is_affordable(found := choose(count)):
            best, low = found, count
        else:
            high = count - 1
        count = (low + high + 1) // 2
    return best


def _space(axes: Sequence[Axis], buckets: Points, cost: CostModel) -> BucketSpace:
    names = tuple(axis.name for axis in axes)
    lows = np.minimum([axis.low for axis in axes], buckets.min(axis=0)).tolist()
    ranges = [replace(axis, low=low) for axis, low in zip(axes, lows, strict=True)]
    return BucketSpace(ranges, [Bucket.of(names, tuple(row)) for row in buckets.tolist()], cost)


def _check_needs(needs: Demand, region: Region, cost: CostOf) -> None:
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
