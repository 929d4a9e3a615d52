"""Warms up several members: the step of a model, and the small graphs around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

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
    """

    def __init__(self, *members: Warmable) -> None:
        self._members = members

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
        reports = []
        for member in self._members:
            pending = member.pending
            is_last = done + pending == total
            reports.append(member.warmup(progress and _counted(progress, done, total, is_last)))
            done += pending
        results = tuple(result for report in reports for result in report.results)
        return WarmupReport(results, sum(report.elapsed_seconds for report in reports))


def _counted(
    progress: Callable[[BucketEvent], None], done: int, total: int, is_last: bool
) -> Callable[[BucketEvent], None]:
    def notify(event: BucketEvent) -> None:
        eta = event.eta_seconds if is_last else None
        progress(replace(event, index=event.index + done, total=total, eta_seconds=eta))

    return notify
