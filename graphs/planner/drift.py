"""A watch that tells when the padding of a running engine is far from what its plan promised."""

from __future__ import annotations

from collections.abc import Mapping

from graphs.planner.report import PlanReport

__all__ = ["DriftWatch"]

_FACTOR = 2.0
_LEAST = 0.02


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
