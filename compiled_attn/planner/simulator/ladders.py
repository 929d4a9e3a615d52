"""Bucket ladders that serving engines use, and plans that are compared with them.

Rules and default parameters are those of vLLM's Gaudi plugin (``vllm_gaudi.extension.bucketing``:
exponential, padding-aware of pull request 762, unified), without buckets that no legal need can
reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from compiled_attn.planner import Budget, Demand, Judgement, PlanReport, by_cost, judge, plan
from compiled_attn.planner.pick import PickOrder
from compiled_attn.planner.simulator.kinds import StepKind, within
from graphs.buckets.ladders import explicit, exponential, padding_aware
from graphs.buckets.space import BucketSpace

__all__ = ["SplitPlan", "highest", "ladders_within", "reachable", "unified"]

Points: TypeAlias = Mapping[str, int]

_MAX_PRODUCT = 8  # times the number of graphs, before unreachable buckets are removed


class SplitPlan:
    """Plans for a kind of steps which are judged on the second half of some needs.

    No plan wastes more there than the engine's own ladder, if that is within the budget.

    Args:
        kind: axes, legal needs and cost.
        needs: in order of time; the plans are for those within the axes.
        ladder: the engine's own buckets.
        budget: what may be captured; a number is a number of buckets.
        rho: of the guard; None: no guard.
        order: how the engine picks.
        choose: chooses the buckets, with the arguments of `compiled_attn.planner.plan`.
        expenses: its arguments ``seconds`` and ``bytes``, for budgets in them.

    Attributes:
        fitting: the needs within the axes.
        outside: share of the others.
        early: the plan for the first half.

    Raises:
        ValueError: what `compiled_attn.planner.plan` raises, or there is only one need.
    """

    def __init__(
        self,
        kind: StepKind,
        needs: Demand,
        ladder: BucketSpace,
        budget: Budget | int,
        rho: float | None,
        order: PickOrder = by_cost,
        choose: Callable[..., PlanReport] = plan,
        expenses: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.kind, self.ladder, self.order = kind, ladder, order
        first, self.second = needs.project(kind.names).halves()
        self.fitting, self.outside = within(needs, kind.axes)
        self._plan = partial(
            choose,
            cost=kind.cost,
            budget=budget,
            axes=kind.axes,
            legal=kind.legal,
            rho=rho,
            order=order,
            ladder=ladder,
            **expenses,
        )
        early, late = (within(half, kind.axes)[0] for half in (first, self.second))
        self.early = self._plan(kind.with_largest_usual(early), unseen=late)

    def whole(self) -> PlanReport:
        """Return the plan for both halves; the ladder where that is better on the second."""
        if self.early.is_ladder:
            judged = self.early.judge(self.fitting)
            return replace(self.early, waste=judged.waste, uses=judged.uses)
        return self._plan(self.kind.with_largest_usual(self.fitting))

    @property
    def ours(self) -> Judgement:
        """The plan for the first half on the second."""
        return self.early.judge(self.second)

    @property
    def paid(self) -> float:
        """Cost of the second half in the plan for the first, of the needs within the axes."""
        fitting = within(self.second, self.kind.axes)[0]
        own = float(self.kind.cost.of(fitting.names, fitting.points) @ fitting.weights)
        return own * (1 + self.early.judge(fitting).waste)

    @property
    def theirs(self) -> Judgement:
        """The engine's own ladder on the second half."""
        return self.judge(self.ladder)

    def judge(self, space: BucketSpace) -> Judgement:
        """Serve the second half from other buckets by the engine's own rule of picking."""
        return judge(space.with_cost(self.kind.cost), self.second, self.kind.cost, self.order)

    def judged(self, max_graphs: int) -> dict[str, Judgement]:
        """Return the results of usual ladders, the engine's own and the plan, by name."""
        usual = ladders_within(self.kind, max_graphs)
        found = {name: self.judge(space) for name, space in usual.items()}
        return {**found, "engine's default": self.theirs, "fitted plan": self.ours}


def ladders_within(kind: StepKind, max_graphs: int) -> dict[str, BucketSpace]:
    """Return exponential, padding-aware and unified ladders by name.

    The axes get one more size in turn while ``max_graphs`` allows; logits have only the largest.
    The padding-aware ladder pads by half at most above its smallest sizes; the unified one is for
    steps of both prompts and decodes.
    """
    high = highest(kind)

    def of_exponential(points: Points) -> BucketSpace:
        return exponential(**{name: (1, max(1, high[name]), n) for name, n in points.items()})

    def of_padding(points: Points) -> BucketSpace:
        lows = {name: math.ceil(high[name] / 2 ** (n - 1)) for name, n in points.items()}
        return padding_aware(
            **{name: (low, max(1, low), high[name], 0, 50) for name, low in lows.items()}
        )

    makers = {"exponential": of_exponential, "padding-aware": of_padding}
    if "shared" in high:
        makers["unified ladder"] = lambda points: unified(kind, points, few=8)
    return {name: _fitting(make, kind, max_graphs) for name, make in makers.items()}


def _fitting(make: Callable[[Points], BucketSpace], kind: StepKind, most: int) -> BucketSpace:
    points = {axis.name: 1 for axis in kind.axes if axis.name != "logits"}
    best, growing = reachable(make(points), kind), set(points)
    if len(best) > most:
        best = explicit(kind.axes, [_maximum(kind)])
    while growing:
        for name in sorted(growing):
            found = None
            for further in (1, 2, 3):  # rounding may make a ladder of more points no larger
                more = {**points, name: points[name] + further}
                space = make(more)
                if len(space) > _MAX_PRODUCT * most:
                    break
                found = reachable(space, kind)
                if len(found) > len(best):
                    break
            if found is None or not len(best) < len(found) <= most:
                growing.remove(name)
            else:
                points, best = more, found
    return best


def reachable(space: BucketSpace, kind: StepKind) -> BucketSpace:
    """Extend a ladder to the kind's axes and maximum, without unreachable buckets."""
    if missing := [axis for axis in kind.axes if axis.name not in space.names]:
        space = space * explicit(missing, [[axis.high for axis in missing]])
    columns = [[bucket[name] for name in kind.names] for bucket in space]
    columns.append(_maximum(kind))
    return explicit(kind.axes, columns).where(lambda need: bool(kind.legal(need)))


def _maximum(kind: StepKind) -> list[int]:
    return [axis.high for axis in kind.axes]


def highest(kind: StepKind) -> dict[str, int]:
    """Return the largest size of usual ladders, by axis."""
    return {axis.name: axis.high for axis in kind.axes} | dict(kind.usual)


def unified(kind: StepKind, points: Points, few: int = 1) -> BucketSpace:
    """Return an exponential ladder of multiples of 128, or less where few sizes remain."""
    multiple = 128
    low, high = {axis.name: axis.low for axis in kind.axes}, highest(kind)
    return exponential(
        **{
            name: (low[name], high[name], n, max(1, min(multiple, high[name] // few)))
            for name, n in points.items()
        }
    )
