"""One warmup of several callables: a model's step, and the small graphs around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphs.buckets.space import Bucket, BucketSpace
from graphs.capture.inputs import Input
from graphs.warmup.manager import WarmupManager
from graphs.warmup.report import BucketEvent, WarmupReport

__all__ = ["WarmupGroup"]


class WarmupGroup(Mapping[str, WarmupManager]):
    """Managers by name, warmed up one after the other, with one progress and one report.

    Each keeps its own buckets, order and budgets, and serves on its own: `group["swap"]`.
    """

    def __init__(self) -> None:
        self._managers: dict[str, WarmupManager] = {}

    def add(
        self,
        name: str,
        module: Callable[..., Any],
        buckets: BucketSpace,
        make_inputs: Callable[[Bucket], Sequence[Input]],
        **settings: Any,
    ) -> WarmupManager:
        """Make the manager of a callable; `settings` are those of :class:`WarmupManager`.

        Raises:
            ValueError: the name is taken, or a setting is wrong.
        """
        self._check_free(name)
        manager = WarmupManager(module, buckets, make_inputs, name=name, **settings)
        self._managers[name] = manager
        return manager

    def take(self, manager: WarmupManager) -> None:
        """Let a manager that exists take part, under its own name.

        Raises:
            ValueError: the name is taken.
        """
        self._check_free(manager.name)
        self._managers[manager.name] = manager

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Capture what is not captured yet, in the order of adding; one report of everything.

        Args:
            progress: hears of all buckets with one count; what is left is estimated from the
                callable at work alone, so that no time is told before the last one.

        Raises:
            GraphBudgetExceeded: a strict `no_compile` is armed.
        """
        total = sum(manager.pending for manager in self.values())
        done = 0
        for place, manager in enumerate(self.values()):
            pending = manager.pending
            is_last = place == len(self) - 1
            manager.warmup(_counted(progress, done, total, is_last) if progress else None)
            done += pending
        return self.report or WarmupReport((), 0.0)

    @property
    def report(self) -> WarmupReport | None:
        """The outcomes of all managers, each with its callable's name; None before the first."""
        reports = [manager.report for manager in self.values() if manager.report is not None]
        if not reports:
            return None
        results = tuple(result for report in reports for result in report.results)
        return WarmupReport(results, sum(report.elapsed_seconds for report in reports))

    def close(self) -> None:
        """Free the graphs of all managers."""
        for manager in self.values():
            manager.close()

    def __getitem__(self, name: str) -> WarmupManager:
        return self._managers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._managers)

    def __len__(self) -> int:
        return len(self._managers)

    def _check_free(self, name: str) -> None:
        if name in self._managers:
            raise ValueError(f"name {name!r} is taken; expected another than {', '.join(self)}")


def _counted(
    progress: Callable[[BucketEvent], None], done: int, total: int, is_last: bool
) -> Callable[[BucketEvent], None]:
    def tell(event: BucketEvent) -> None:
        eta = event.eta_seconds if is_last else None
        progress(replace(event, index=event.index + done, total=total, eta_seconds=eta))

    return tell
