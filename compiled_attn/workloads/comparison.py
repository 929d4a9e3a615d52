"""Bucket strategies side by side: fitted on one part of a demand, judged on another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiled_attn.workloads.families import Family, within
from compiled_attn.workloads.ladders import ladders_within
from graphs.buckets.space import BucketSpace
from graphs.planner import Demand, Judgement, PlanReport, judge, plan

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What each strategy does to needs that none of them was fitted on.

    Args:
        plan: the plan, fitted on the first needs.
        judged: by name, the plan last.
    """

    plan: PlanReport
    judged: dict[str, Judgement]


def compare(
    family: Family,
    first: Demand,
    second: Demand,
    max_graphs: int,
    *,
    others: Mapping[str, BucketSpace] | None = None,
    rho: float | None = 3.0,
) -> Comparison:
    """Judge the ladders of the field and a fitted plan, all of at most ``max_graphs``.

    Args:
        family: axes, legal needs and cost.
        first: what the plan is fitted on, less what no legal bucket holds; the ladders know the
            limits only.
        second: what all are judged on; a step that must be cut counts as missed.
        max_graphs: buckets of each at most.
        others: further buckets to judge, by name.
        rho: of the plan's guard; None: no guard.

    Raises:
        ValueError: what `graphs.planner.plan` and `judge` raise.
    """
    kept = family.foreseen(within(first, family.axes)[0])
    fitted = plan(kept, family.cost, max_graphs, axes=family.axes, legal=family.legal, rho=rho)
    spaces = {**ladders_within(family, max_graphs), **(others or {})}
    judged = {
        name: judge(space.with_cost(family.cost), second, family.cost)
        for name, space in spaces.items()
    }
    return Comparison(fitted, {**judged, "fitted plan": fitted.judge(second)})
