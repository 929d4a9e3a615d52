"""Evaluates buckets on a demand, and reports a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiled_attn.planner.cost import CostModel
from compiled_attn.planner.demand import Demand
from compiled_attn.planner.pick import PickOrder, by_cost, picks
from graphs.buckets.space import Bucket, BucketSpace

__all__ = ["BucketUse", "Judgement", "PlanReport", "judge"]


@dataclass(frozen=True, slots=True)
class BucketUse:
    """The use of one bucket.

    Args:
        bucket: its sizes.
        share: of the steps that run in it.
        waste: cost of its steps beyond that of their needs, as a share of the cost of all needs;
            the wastes of all buckets add up to the waste of the set.
    """

    bucket: Bucket
    share: float
    waste: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """A demand served by a set of buckets.

    Args:
        graphs: number of buckets.
        waste: cost of the buckets used over the cost of the needs, less 1; needs that no bucket
            dominates are left out.
        missed: share of the steps that no bucket dominates.
        worst: the most that a need pays, in multiples of its own cost.
        uses: of each bucket, in the order of the space.
    """

    graphs: int
    waste: float
    missed: float
    worst: float
    uses: tuple[BucketUse, ...]

    @property
    def unused(self) -> int:
        """Number of buckets that serve no need."""
        return sum(not use.share for use in self.uses)


def judge(
    space: BucketSpace, demand: Demand, cost: CostModel, order: PickOrder = by_cost
) -> Judgement:
    """Serve a demand from a space, picking the cheapest bucket, or in another order.

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
    which = picks(buckets, order(buckets, lambda p: cost.of(space.names, p)), needs.points)
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
    """The buckets that `plan` chose, and their use on the demand they were chosen for.

    Args:
        space: the buckets, with the cost that picks among them.
        cost: the cost that was planned with.
        waste: cost of the buckets used over the cost of the needs, less 1.
        guard: how many times its own cost any legal need pays at most.
        rho: the multiple that was requested of the guard; None: no guard.
        uses: share of the steps and of the waste of each bucket.
        seconds: warmup seconds of all buckets; None where they were not planned with.
        bytes: memory of all graphs, likewise.
        order: how the engine picks.
        is_ladder: the buckets are the engine's own ladder, which wasted less.
    """

    space: BucketSpace
    cost: CostModel
    waste: float
    guard: float
    rho: float | None
    uses: tuple[BucketUse, ...]
    seconds: float | None = None
    bytes: float | None = None
    order: PickOrder = by_cost
    is_ladder: bool = False

    def judge(self, demand: Demand) -> Judgement:
        """Serve another demand with the buckets."""
        return judge(self.space, demand, self.cost, self.order)

    def __str__(self) -> str:
        first = (
            f"{len(self.space)} buckets, waste {self.waste:.1%}, "
            f"no legal need above {self.guard:.3g} times its cost"
        )
        if self.seconds is not None:
            first += f", {self.seconds:.3g} s of warmup"
        if self.bytes is not None:
            first += f", {self.bytes / 2**20:.3g} MiB"
        by_share = sorted(self.uses, key=lambda use: -use.share)
        lines = (f"{u.bucket}  {u.share:.1%} of steps, waste {u.waste:.2%}" for u in by_share)
        return "\n".join([first, *lines])
