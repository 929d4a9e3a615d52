"""Warms up several members: the step of a model, and the small graphs around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from graphs.warmup.capturing import Budget
from graphs.warmup.report import BucketEvent, WarmupReport

__all__ = ["WarmupGroup"]


class Warmable(Protocol):
    """A member of a group: a :class:`~graphs.WarmupManager`, its owner, or another group."""

    @property
    def pending(self) -> int:
        """How many buckets are not captured yet."""

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Capture them."""


class WarmupGroup:
    """Warms up members one after the other, with one progress and one report.

    Each member has its own buckets, order and budgets, and runs its own graphs.

    Args:
        members: in the order of their warmup.
        budget_seconds, budget_bytes: start no capture once all members together took this long, or
            their graphs take this much memory; members are managers or :func:`graphs.bucketed`.

    Raises:
        ValueError: a negative budget.
    """

    def __init__(
        self,
        *members: Warmable,
        budget_seconds: float | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        self._members = members
        self._budget = Budget(budget_seconds, budget_bytes)

    @property
    def pending(self) -> int:
        """How many buckets are not captured yet."""
        return sum(member.pending for member in self._members)

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Capture what is not captured yet; report on all buckets of all members.

        Args:
            progress: called with an event per bucket, numbered through all members. Only those of
                the last member say how much time is left, since each estimates only its own.

        Raises:
            GraphBudgetExceeded: a strict `no_compile` is armed.
        """
        total, done = self.pending, 0
        reports: list[WarmupReport] = []
        for member in self._members:
            pending = member.pending
            is_last = done + pending == total
            counted = progress and _counted(progress, done, total, is_last)
            reports.append(member.warmup(counted, **self._left(reports)))
            done += pending
        results = tuple(result for report in reports for result in report.results)
        return WarmupReport(results, sum(report.elapsed_seconds for report in reports))

    def _left(self, reports: list[WarmupReport]) -> dict[str, Any]:
        """The rest of the budgets after some members, as keywords of the next one."""
        left: dict[str, Any] = {}
        if self._budget.seconds is not None:
            spent = sum(report.elapsed_seconds for report in reports)
            left["budget_seconds"] = max(0.0, self._budget.seconds - spent)
        if self._budget.bytes is not None:
            left["budget_bytes"] = max(0, self._budget.bytes - sum(r.bytes for r in reports))
        return left


def _counted(
    progress: Callable[[BucketEvent], None], done: int, total: int, is_last: bool
) -> Callable[[BucketEvent], None]:
    def notify(event: BucketEvent) -> None:
        eta = event.eta_seconds if is_last else None
        progress(replace(event, index=event.index + done, total=total, eta_seconds=eta))

    return notify
