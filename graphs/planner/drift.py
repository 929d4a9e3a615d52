"""Says when the padding of a running engine is far from what its plan promised."""

from __future__ import annotations

from collections.abc import Mapping

from graphs.planner.cost import CostModel
from graphs.planner.report import PlanReport

__all__ = ["DriftWatch"]

_LEAST = 0.02


class DriftWatch:
    """Watches the running waste, and flags when it exceeds twice what the plan promised.

    The waste is that of about the last ``window`` steps: older ones fade. Nothing is flagged before
    ``after`` steps, because a plan should not be replaced on less; nor below 2 %, because nothing
    would be won.

    Args:
        promised: the waste that the plan promised, or the plan's report.
        cost: of a bucket; not needed beside a report.
        after: steps before anything is flagged.
        window: steps that count.
        factor: how many times the promised waste is too much.

    Raises:
        ValueError: a promise without a cost, or a number that is out of range.

    Example::

        watch = DriftWatch(plan_report)
        if watch.record(need, bucket):
            print(watch)  # once; then plan again, from what was recorded
    """

    def __init__(
        self,
        promised: PlanReport | float,
        cost: CostModel | None = None,
        *,
        after: int = 10_000,
        window: int = 10_000,
        factor: float = 2.0,
    ) -> None:
        if isinstance(promised, PlanReport):
            cost = cost or promised.cost
            promised = promised.waste
        if cost is None:
            raise ValueError("expected a cost beside a promised waste, got none: pass the plan's")
        if promised < 0 or after < 1 or window < 1 or factor <= 1:
            raise ValueError(
                "expected promised >= 0, after >= 1, window >= 1 and factor > 1, got "
                f"{promised}, {after}, {window} and {factor}: correct them"
            )
        self.promised = promised
        self.steps = 0
        self.has_drifted = False
        self._cost, self._after = cost, after
        self._limit = max(factor * promised, _LEAST)
        self._fade = 1 - 1 / window
        self._paid = self._own = 0.0

    @property
    def waste(self) -> float:
        """The running waste."""
        return self._paid / self._own - 1 if self._own else 0.0

    def record(self, need: Mapping[str, int], bucket: Mapping[str, int]) -> bool:
        """Note a step; True once, at the step at which the flag goes up."""
        self._paid = self._paid * self._fade + self._cost(bucket)
        self._own = self._own * self._fade + self._cost(need)
        self.steps += 1
        if self.has_drifted or self.steps < self._after or self.waste <= self._limit:
            return False
        self.has_drifted = True
        return True

    def __str__(self) -> str:
        state = "drifted: " if self.has_drifted else ""
        return (
            f"{state}waste {self.waste:.1%} over the last steps of {self.steps:,}, "
            f"{self.promised:.1%} was promised"
        )
