"""The order of captures, and an estimate of the remaining time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from graphs.buckets.axes import Bucket
from graphs.buckets.space import BucketSpace
from graphs.errors import BucketOverflow
from graphs.warmup.report import BucketEvent, BucketResult, EventStatus

__all__ = ["Order", "Schedule", "Usage", "in_order"]

Order: TypeAlias = (
    "Literal['largest_first', 'smallest_first', 'most_used', 'given'] | Callable[[Bucket], Any]"
)
Usage: TypeAlias = "Mapping[Bucket, int]"


def in_order(buckets: BucketSpace, order: Order, usage: Usage | None = None) -> list[Bucket]:
    """Sort the buckets of a space: by its cost, by usage, as given, or by a key function.

    `most_used` sorts by how often `usage` counts needs that a bucket serves, then by cost. The
    largest bucket still comes first, so that every need has a bucket from then on.

    Raises:
        ValueError: an unknown order, or `most_used` without a usage, or the other way round.
    """
    if (order == "most_used") != (usage is not None):
        raise ValueError(
            f"order is {order!r} and usage is {'not ' if usage is None else ''}given; expected "
            "order='most_used' together with usage={need: count}, or neither"
        )
    if order == "given":
        return list(buckets)
    if order in ("largest_first", "smallest_first"):
        largest = order == "largest_first"
        return sorted(buckets, key=lambda b: (buckets.cost(b), b.sizes), reverse=largest)
    if usage is not None:
        used = _uses(buckets, usage)
        first = buckets.largest
        return sorted(buckets, key=lambda b: (b != first, -used[b], buckets.cost(b), b.sizes))
    if callable(order):
        return sorted(buckets, key=order)
    raise ValueError(
        f"order is {order!r}; expected 'largest_first', 'smallest_first', 'most_used', 'given' or "
        "a key function"
    )


def _uses(buckets: BucketSpace, usage: Usage) -> dict[Bucket, int]:
    used = dict.fromkeys(buckets, 0)
    for need, count in usage.items():
        try:
            used[buckets.pick(**need)] += count
        except BucketOverflow:
            continue  # the caller splits such a need
    return used


class Schedule:
    """The buckets of one warmup, the elapsed time, and an estimate of the rest.

    The estimate of a bucket is what an earlier warmup measured, scaled by how much slower this one
    is so far; else the mean of the buckets that are done. Only the first bucket of a shape group is
    compiled, so compiled and shared captures have a mean each.

    Args:
        buckets: in the order of this warmup.
        measured: seconds of earlier captures.
        group_key: equal for buckets that share a graph.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        measured: Mapping[Bucket, float] | None = None,
        group_key: Callable[[Bucket], Bucket] = lambda bucket: bucket,
    ) -> None:
        self.buckets = buckets
        self._measured = dict(measured or {})
        self._group_key = group_key
        self._compiled: dict[Bucket, Bucket] = {}  # the first of each group
        self._start = time.perf_counter()
        self._done: dict[Bucket, float] = {}
        self._left = dict.fromkeys(buckets)

    def elapsed(self) -> float:
        """Seconds since the warmup began."""
        return time.perf_counter() - self._start

    def done(self, result: BucketResult) -> None:
        """Take the result of a bucket into account."""
        self._left.pop(result.bucket)
        if result.status != "skipped":
            self._done[result.bucket] = result.seconds
            self._compiled.setdefault(self._group_key(result.bucket), result.bucket)

    def event(self, bucket: Bucket, index: int, status: EventStatus, **fields: Any) -> BucketEvent:
        """Make the event that `bucket`, number `index` of the warmup, has reached `status`."""
        return BucketEvent(
            bucket,
            status,
            index,
            total=len(self.buckets),
            elapsed_seconds=self.elapsed(),
            eta_seconds=self._eta(),
            **fields,
        )

    def _eta(self) -> float | None:
        pace = self._pace()
        known = [self._measured[bucket] for bucket in self._left if bucket in self._measured]
        unknown = [bucket for bucket in self._left if bucket not in self._measured]
        if unknown and not self._done:
            return None
        return pace * sum(known) + self._of_unknown(unknown)

    def _pace(self) -> float:
        both = [bucket for bucket in self._done if self._measured.get(bucket)]
        before = sum(self._measured[bucket] for bucket in both)
        return sum(self._done[bucket] for bucket in both) / before if before else 1.0

    def _of_unknown(self, buckets: Sequence[Bucket]) -> float:
        first = {self._group_key(bucket): bucket for bucket in reversed(buckets)}
        new = sum(key not in self._compiled for key in first)
        compiled = [*self._compiled.values()]
        shared = [bucket for bucket in self._done if bucket not in compiled]
        return new * self._mean(compiled) + (len(buckets) - new) * self._mean(shared)

    def _mean(self, buckets: Sequence[Bucket]) -> float:
        # Captures that share a graph take almost no time.
        return statistics.fmean(map(self._done.__getitem__, buckets)) if buckets else 0.0
