"""A plan, and what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphs.buckets.space import BucketSpace
from graphs.planner.cost import CostModel
from graphs.planner.demand import Demand
from graphs.planner.judge import BucketUse, Judgement, judge

__all__ = ["PlanReport"]


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

    @property
    def is_guarded(self) -> bool:
        """Whether the budget sufficed for the guard that was asked for."""
        return self.rho is None or self.guard <= self.rho * (1 + 1e-9)

    def judge(self, demand: Demand) -> Judgement:
        """What the buckets do to another demand."""
        return judge(self.space, demand, self.cost)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return {
            "space": self.space.to_json(),
            "waste": self.waste,
            "lower_bound": self.lower_bound,
            "guard": self.guard,
            "rho": self.rho,
            "guards": self.guards,
            "steps": self.steps,
            "uses": [
                {"bucket": list(use.bucket.sizes), "share": use.share, "waste": use.waste}
                for use in self.uses
            ],
            "seconds": self.seconds,
            "bytes": self.bytes,
        }

    def __str__(self) -> str:
        lines = [
            f"{len(self.space)} buckets, waste {self.waste:.1%} (at least {self.lower_bound:.1%}), "
            f"no legal need above {self.guard:.3g} times its cost"
        ]
        by_share = sorted(self.uses, key=lambda use: -use.share)
        lines += [f"{u.bucket}  {u.share:.1%} of steps, waste {u.waste:.2%}" for u in by_share]
        return "\n".join(lines)
