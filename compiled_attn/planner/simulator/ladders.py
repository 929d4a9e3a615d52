"""Bucket ladders that serving engines use, compared with a plan of the same number of graphs.

Rules and default parameters are those of vLLM's Gaudi plugin (``vllm_gaudi.extension.bucketing``:
exponential, padding-aware of pull request 762, unified), without buckets that no legal need can
reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from compiled_attn.planner import Demand, Judgement, PlanReport, judge, plan
from compiled_attn.planner.simulator.kinds import StepKind, within
from graphs.buckets.ladders import explicit, exponential, linear, padding_aware
from graphs.buckets.space import BucketSpace

__all__ = ["Comparison", "compare", "highest", "ladders_within", "reachable", "unified"]

Points: TypeAlias = Mapping[str, int]

_FINE = 64  # steps of a padding-aware axis
_MAX_PRODUCT = 8  # times the number of graphs, before unreachable buckets are removed


class Comparison(NamedTuple):
    """A plan, and the results of all strategies by name on unseen needs, the plan last."""

    plan: PlanReport
    judged: dict[str, Judgement]


def compare(
    kind: StepKind,
    first: Demand,
    second: Demand,
    max_graphs: int,
    *,
    others: Mapping[str, BucketSpace] | None = None,
    rho: float | None = 3.0,
) -> Comparison:
    """Compare usual ladders, others and a plan, each of at most ``max_graphs`` buckets.

    Args:
        kind: axes, legal needs and cost.
        first: what the plan is fitted on, without needs outside the axes; ladders know only the
            limits.
        second: what all are evaluated on; a step that must be split counts as missed.
        max_graphs: limit of each.
        others: further buckets, by name.
        rho: of the plan's guard; None: no guard.

    Raises:
        ValueError: what `compiled_attn.planner.plan` and `judge` raise.
    """
    demand = kind.with_largest_usual(within(first, kind.axes)[0])
    spaces = {**ladders_within(kind, max_graphs), **(others or {})}
    fitted = plan(demand, kind.cost, max_graphs, axes=kind.axes, legal=kind.legal, rho=rho)
    judged = {
        name: judge(space.with_cost(kind.cost), second, kind.cost) for name, space in spaces.items()
    }
    return Comparison(fitted, {**judged, "fitted plan": fitted.judge(second)})


def ladders_within(kind: StepKind, max_graphs: int) -> dict[str, BucketSpace]:
    """Return linear, exponential, padding-aware and unified ladders by name.

    The axes get one more size in turn while ``max_graphs`` allows; logits have only the largest.
    Padding-aware ladders have fixed fine steps, and ``max_graphs`` decides how much they pad. The
    unified ladder is for steps of both prompts and decodes.
    """
    high = {name: size for name, size in highest(kind).items() if name != "logits"}

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
        makers["unified ladder"] = lambda points: unified(kind, points, few=8)
    found = {name: _fitting(make, kind, max_graphs) for name, make in makers.items()}
    aware = _padding_aware(kind, high, max_graphs)
    first = {name: found.pop(name) for name in ("linear", "exponential")}
    return {**first, "padding-aware": aware, **found}


def _padding_aware(kind: StepKind, high: Points, most: int) -> BucketSpace:
    """The smallest relative padding that ``most`` graphs allow, from size 1 in fine steps.

    If they do not allow 50 per cent, the ladder of 50 per cent starts at a larger size.
    """

    def made(percent: int) -> BucketSpace | None:
        sizes = {
            name: (min(1, size), max(1, math.ceil(size / _FINE)), size, 0, percent)
            for name, size in high.items()
        }
        each = [len(padding_aware(size=axis)) for axis in sizes.values()]
        return padding_aware(**sizes) if math.prod(each) <= _MAX_PRODUCT * most else None

    for percent in range(10, 51, 5):
        space = made(percent)
        if space is not None and len(found := reachable(space, kind)) <= most:
            return found

    def of_half(points: Points) -> BucketSpace:
        lows = {name: math.ceil(high[name] / 2 ** (n - 1)) for name, n in points.items()}
        return padding_aware(
            **{name: (low, max(1, low), high[name], 0, 50) for name, low in lows.items()}
        )

    return _fitting(of_half, kind, most)


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
