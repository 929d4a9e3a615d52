"""In what order buckets are captured, and how long the rest is likely to take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from graphs.buckets import Bucket, BucketSpace
from graphs.warmup_report import BucketEvent, BucketResult, EventStatus

__all__ = ["Order", "Schedule", "in_order"]

Order: TypeAlias = "Literal['largest_first', 'smallest_first', 'given'] | Callable[[Bucket], Any]"


def in_order(buckets: BucketSpace, order: Order) -> list[Bucket]:
    """Sort the buckets of a space: by its cost, as given, or by a key function.

    Raises:
        ValueError: an unknown order.
    """
    if order == "given":
        return list(buckets)
    if order in ("largest_first", "smallest_first"):
        largest = order == "largest_first"
        return sorted(buckets, key=lambda b: (buckets.cost(b), b.sizes), reverse=largest)
    if callable(order):
        return sorted(buckets, key=order)
    raise ValueError(
        f"order is {order!r}; expected 'largest_first', 'smallest_first', 'given' or a key function"
    )


class Schedule:
    """The buckets of one warmup, the time it has taken, and an estimate of the rest.

    A capture takes a time of its own (tracing, compiling) and one that grows with the bucket's cost
    (running it): both are fitted to the buckets that are done.
    """

    def __init__(self, buckets: Sequence[Bucket], cost: Callable[[Bucket], float]) -> None:
        self.buckets = buckets
        self._cost = cost
        self._start = time.perf_counter()
        self._done: list[tuple[float, float]] = []
        self._left = [cost(bucket) for bucket in buckets]

    def elapsed(self) -> float:
        """Seconds since the warmup began."""
        return time.perf_counter() - self._start

    def done(self, result: BucketResult) -> None:
        """Learn from a bucket that is done."""
        cost = self._cost(result.bucket)
        self._left.remove(cost)
        if result.status != "skipped":
            self._done.append((cost, result.seconds))

    def event(self, index: int, status: EventStatus, **outcome: Any) -> BucketEvent:
        """Make the event that the bucket at `index` has come to `status`."""
        return BucketEvent(
            self.buckets[index],
            status,
            index,
            total=len(self.buckets),
            elapsed_seconds=self.elapsed(),
            eta_seconds=self._eta(),
            **outcome,
        )

    def _eta(self) -> float | None:
        if not self._done:
            return None
        costs, seconds = zip(*self._done, strict=True)
        rate = 0.0
        if len(set(costs)) > 1:
            rate = max(0.0, statistics.linear_regression(costs, seconds).slope)
        fixed = max(0.0, statistics.fmean(seconds) - rate * statistics.fmean(costs))
        return sum(fixed + rate * cost for cost in self._left)
