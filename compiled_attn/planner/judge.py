"""Judgements of buckets on a demand, the report of a plan, and a watch over what it promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from compiled_attn.planner.choose import cheapest
from compiled_attn.planner.cost import CostModel
from compiled_attn.planner.demand import Demand
from compiled_attn.planner.drift import DriftReport, PickOrder, by_cost
from graphs.buckets.axes import Bucket
from graphs.buckets.space import BucketSpace

__all__ = ["BucketUse", "DriftWatch", "Judgement", "PlanReport", "judge"]

_FACTOR = 2.0
_LEAST = 0.02


@dataclass(frozen=True, slots=True)
class BucketUse:
    """One bucket at work.

    Args:
        bucket: its sizes.
        share: part of the steps that run in it.
        waste: what its steps pay beyond their own cost, as a part of the cost of all needs. The
            wastes of all buckets add up to the waste of the set.
    """

    bucket: Bucket
    share: float
    waste: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """A demand served by a set of buckets.

    Args:
        graphs: buckets of the set.
        waste: cost of the buckets used over the cost of the needs, less 1; needs that no bucket
            holds are left out.
        missed: part of the steps that no bucket holds.
        worst: the most that a need pays, in multiples of its own cost.
        uses: each bucket, in the order of the space.
    """

    graphs: int
    waste: float
    missed: float
    worst: float
    uses: tuple[BucketUse, ...]

    @property
    def unused(self) -> int:
        """Buckets that no need goes to."""
        return sum(not use.share for use in self.uses)


def judge(
    space: BucketSpace, demand: Demand, cost: CostModel, order: PickOrder = by_cost
) -> Judgement:
    """Serve a demand from a space, each need by the cheapest bucket that holds it, or in another
    order: ``compiled_attn.planner.by_size``.

    Raises:
        ValueError: the demand has other axes than the space, or costs nothing.
    """
    if set(demand.names) != set(space.names):
        raise ValueError(
            f"expected a demand over {', '.join(space.names)}, got one over "
            f"{', '.join(demand.names)}: project it, or choose other buckets"
        )
    needs = demand.project(space.names).histogram()
    buckets = np.array([bucket.sizes for bucket in space], np.int64)
    costs, own = cost.of(space.names, buckets), cost.of(space.names, needs.points)
    ranks = order(buckets, lambda points: cost.of(space.names, points))
    which = cheapest(buckets, ranks, needs.points)
    held = which >= 0
    which, own, weights = which[held], own[held], needs.weights[held]
    total = float(own @ weights)
    if held.any() and not total > 0:
        raise ValueError("expected needs that cost something, got a cost of 0: correct the cost")
    wasted = np.bincount(which, (costs[which] - own) * weights, minlength=len(buckets))
    share = np.bincount(which, weights, minlength=len(buckets)) / needs.total
    times = costs[which][own > 0] / own[own > 0]
    uses = zip(space, share.tolist(), (wasted / (total or 1.0)).tolist(), strict=True)
    return Judgement(
        graphs=len(space),
        waste=float(wasted.sum() / total) if total else 0.0,
        missed=float(needs.weights[~held].sum() / needs.total),
        worst=float(times.max(initial=1.0)),
        uses=tuple(BucketUse(*use) for use in uses),
    )


@dataclass(frozen=True)
class PlanReport:
    """The buckets that `plan` chose, and what they do to the demand that they were chosen for.

    Args:
        space: the buckets, with the cost that picks among them.
        cost: the cost that was planned with.
        waste: padding on that demand: cost of the buckets used over the cost of the needs, less 1.
        lower_bound: no buckets within the budget waste less on it (without a guard).
        guard: how many times its own cost any legal need pays at most.
        rho: the multiple that the guard was asked for; None: no guard.
        guards: buckets that are there for the guard alone.
        steps: weight of the demand.
        uses: each bucket's share of the steps and of the waste.
        seconds: warmup seconds of all buckets; None where they were not planned with.
        bytes: of all graphs; None where they were not planned with.
        order: by which the engine picks.
        drift: what drift the plan bears; None where it was not planned for.
    """

    space: BucketSpace
    cost: CostModel
    waste: float
    lower_bound: float
    guard: float
    rho: float | None
    guards: int
    steps: float
    uses: tuple[BucketUse, ...]
    seconds: float | None = None
    bytes: float | None = None
    order: PickOrder = by_cost
    drift: DriftReport | None = None

    def judge(self, demand: Demand) -> Judgement:
        """What the buckets do to another demand."""
        return judge(self.space, demand, self.cost, self.order)

    def __str__(self) -> str:
        lines = [
            f"{len(self.space)} buckets, waste {self.waste:.1%} (at least {self.lower_bound:.1%}), "
            f"no legal need above {self.guard:.3g} times its cost"
        ]
        lines += [] if self.drift is None else [str(self.drift)]
        by_share = sorted(self.uses, key=lambda use: -use.share)
        lines += [f"{u.bucket}  {u.share:.1%} of steps, waste {u.waste:.2%}" for u in by_share]
        return "\n".join(lines)


class DriftWatch:
    """Watches the running waste, and flags when it exceeds twice what the plan promised.

    The waste is that of about the last ``window`` steps: older ones fade. Nothing is flagged before
    ``after`` steps, because a plan should not be replaced on less; nor below 2 %, because nothing
    would be won.

    Args:
        plan: what the engine runs.
        after: steps before anything is flagged.
        window: steps that count.

    Raises:
        ValueError: ``after`` or ``window`` is below 1.

    Example::

        watch = DriftWatch(report)
        if watch.record(need, bucket):
            print(watch)  # once; then plan again, from what was recorded
    """

    def __init__(self, plan: PlanReport, *, after: int = 10_000, window: int = 10_000) -> None:
        if after < 1 or window < 1:
            raise ValueError(f"expected after >= 1 and window >= 1, got {after} and {window}")
        self.steps = 0
        self.has_drifted = False
        self._plan, self._after = plan, after
        self._fade = 1 - 1 / window
        self._paid = self._own = 0.0

    @property
    def waste(self) -> float:
        """The running waste."""
        return self._paid / self._own - 1 if self._own else 0.0

    def record(self, need: Mapping[str, int], bucket: Mapping[str, int]) -> bool:
        """Note a step; True once, at the step at which the flag goes up."""
        self._paid = self._paid * self._fade + self._plan.cost(bucket)
        self._own = self._own * self._fade + self._plan.cost(need)
        self.steps += 1
        limit = max(_FACTOR * self._plan.waste, _LEAST)
        if self.has_drifted or self.steps < self._after or self.waste <= limit:
            return False
        self.has_drifted = True
        return True

    def __str__(self) -> str:
        state = "drifted: " if self.has_drifted else ""
        return (
            f"{state}waste {self.waste:.1%} over the last steps of {self.steps:,}, "
            f"{self._plan.waste:.1%} was promised"
        )
