"""The ladders that serving engines capture today, beside a plan of as many graphs.

Rules and default parameters are those of vLLM's plugin for Gaudi
(``vllm_gaudi.extension.bucketing``: exponential, padding-aware of pull request 762, unified).
Buckets that no legal need reaches are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from compiled_attn.planner import Demand, Judgement, PlanReport, judge, plan
from compiled_attn.planner.simulator.kinds import Family, within
from graphs.buckets.ladders import explicit, exponential, linear, padding_aware
from graphs.buckets.space import BucketSpace

__all__ = ["Comparison", "compare", "highest", "ladders_within", "reachable", "unified"]

Points: TypeAlias = Mapping[str, int]

_FINE = 64  # steps of a padding-aware axis
_MORE = 8  # times as many buckets may a ladder have before the unreachable ones are left out


class Comparison(NamedTuple):
    """A plan, and what it and other strategies (by name, the plan last) do to unseen needs."""

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
    drift: bool = True,
) -> Comparison:
    """Judge the ladders of the field, others, and a plan, all of ``max_graphs`` at most.

    Args:
        family: axes, legal needs and cost.
        first: what the plan is fitted on, less what no legal bucket holds; the ladders know the
            limits only.
        second: what all are judged on; a step that must be cut counts as missed.
        max_graphs: buckets of each at most.
        others: further buckets to judge, by name.
        rho: of the plan's guard; None: no guard.
        drift: plan for the worst of the demands near ``first``.

    Raises:
        ValueError: what `compiled_attn.planner.plan` and `judge` raise.
    """
    kept = family.foreseen(within(first, family.axes)[0])
    spaces = {**ladders_within(family, max_graphs), **(others or {})}
    fitted = plan(
        kept,
        family.cost,
        max_graphs,
        axes=family.axes,
        legal=family.legal,
        rho=rho,
        drift=drift,
        ladders=spaces,
    )
    judged = {
        name: judge(space.with_cost(family.cost), second, family.cost)
        for name, space in spaces.items()
    }
    return Comparison(fitted, {**judged, "fitted plan": fitted.judge(second)})


def ladders_within(family: Family, max_graphs: int) -> dict[str, BucketSpace]:
    """Linear, exponential, padding-aware and unified ladders of at most so many graphs, by name.

    The axes get one size more in turn, as long as the number allows; logits only the largest one.
    Padding-aware ladders keep the field's fine steps, and the number decides how much they pad.
    The unified ladder is for steps that hold prompts and decodes both.
    """
    high = {name: size for name, size in highest(family).items() if name != "logits"}

    def sizes(points: Points) -> dict[str, tuple[int, int, int]]:
        steps = {name: max(1, math.ceil(high[name] / count)) for name, count in points.items()}
        return {name: (min(step, high[name]), step, high[name]) for name, step in steps.items()}

    def of_exponential(points: Points) -> BucketSpace:
        return exponential(**{name: (1, max(1, high[name]), n) for name, n in points.items()})

    makers: dict[str, Callable[[Points], BucketSpace]] = {
        "linear": lambda points: linear(**sizes(points)),
        "exponential": of_exponential,
    }
    if "shared" in high:
        makers["unified ladder"] = lambda points: unified(family, points, few=8)
    found = {name: _fitting(make, family, max_graphs) for name, make in makers.items()}
    aware = _padding_aware(family, high, max_graphs)
    first = {name: found.pop(name) for name in ("linear", "exponential")}
    return {**first, "padding-aware": aware, **found}


def _padding_aware(family: Family, high: Points, most: int) -> BucketSpace:
    """From 1 in fine steps, with the smallest relative padding of which the graphs suffice.

    If they do not for 50 per cent, the ladder of 50 per cent begins at a larger size.
    """

    def made(percent: int) -> BucketSpace | None:
        sizes = {
            name: (min(1, size), max(1, math.ceil(size / _FINE)), size, 0, percent)
            for name, size in high.items()
        }
        each = [len(padding_aware(size=axis)) for axis in sizes.values()]
        return padding_aware(**sizes) if math.prod(each) <= _MORE * most else None

    for percent in range(10, 51, 5):
        space = made(percent)
        if space is not None and len(found := reachable(space, family)) <= most:
            return found

    def of_half(points: Points) -> BucketSpace:
        lows = {name: math.ceil(high[name] / 2 ** (n - 1)) for name, n in points.items()}
        return padding_aware(
            **{name: (low, max(1, low), high[name], 0, 50) for name, low in lows.items()}
        )

    return _fitting(of_half, family, most)


def _fitting(make: Callable[[Points], BucketSpace], family: Family, most: int) -> BucketSpace:
    points = {axis.name: 1 for axis in family.axes if axis.name != "logits"}
    best, growing = reachable(make(points), family), set(points)
    if len(best) > most:
        best = explicit(family.axes, [_maximum(family)])
    while growing:
        for name in sorted(growing):
            found = None
            for further in (1, 2, 3):  # rounding may make a ladder of more points no larger
                more = {**points, name: points[name] + further}
                space = make(more)
                if len(space) > _MORE * most:
                    break
                found = reachable(space, family)
                if len(found) > len(best):
                    break
            if found is None or not len(best) < len(found) <= most:
                growing.remove(name)
            else:
                points, best = more, found
    return best


def reachable(space: BucketSpace, family: Family) -> BucketSpace:
    """Over the family's axes, with its largest step, less what no legal need reaches."""
    if missing := [axis for axis in family.axes if axis.name not in space.names]:
        space = space * explicit(missing, [[axis.high for axis in missing]])
    columns = [[bucket[name] for name in family.names] for bucket in space]
    columns.append(_maximum(family))
    return explicit(family.axes, columns).where(lambda need: bool(family.legal(need)))


def _maximum(family: Family) -> list[int]:
    return [axis.high for axis in family.axes]


def highest(family: Family) -> dict[str, int]:
    """How far the ladders of the field go, by axis."""
    return {axis.name: axis.high for axis in family.axes} | dict(family.usual)


def unified(family: Family, points: Points, few: int = 1) -> BucketSpace:
    """Exponential, rounded up to multiples of 128, or less where that leaves ``few`` sizes."""
    multiple = 128
    low, high = {axis.name: axis.low for axis in family.axes}, highest(family)
    return exponential(
        **{
            name: (low[name], high[name], n, max(1, min(multiple, high[name] // few)))
            for name, n in points.items()
        }
    )
