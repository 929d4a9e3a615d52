"""The order of captures, the groups that share a graph, and the remaining time."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from graphs.buckets.space import Bucket, BucketSpace
from graphs.capture.inputs import Input
from graphs.capture.symbolic import SymbolicSizes
from graphs.errors import BucketOverflow
from graphs.warmup.report import BucketEvent, BucketResult, EventStatus

__all__ = ["Order", "Schedule", "ShapeGroups", "Usage", "in_order"]

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


_ANY = 2  # stands for every size that torch has a symbol for


class ShapeGroups:
    """Shape groups of a set of buckets, and the symbolic sizes that each group shares.

    Two buckets are in one group if they have equal sizes on all axes that are not symbolic, and
    sizes below 2, for which torch has no symbols, on the same axes.

    Args:
        name: of the callable.
        axes: whose sizes are symbolic.
        buckets: all there are.
        make_inputs: makes the example inputs of a bucket.
        runs: how many buckets of a group run, see :class:`~graphs.capture.contract.CaptureSpec`.

    Raises:
        ValueError: there is no such axis.
    """

    def __init__(
        self,
        name: str,
        axes: Sequence[str],
        buckets: Iterable[Bucket],
        make_inputs: Callable[[Bucket], Sequence[Input]],
        runs: int | None = None,
    ) -> None:
        self._name, self._runs = name, runs
        self._axes = frozenset(axes)
        self._make_inputs = make_inputs
        self._members: dict[Bucket, list[Bucket]] = {}
        self._sizes: dict[Bucket, SymbolicSizes] = {}
        for bucket in buckets:
            if unknown := self._axes.difference(bucket):
                raise ValueError(
                    f"symbolic has {min(unknown)!r}; expected axes of the buckets: "
                    f"{', '.join(bucket)}"
                )
            self._members.setdefault(self.key(bucket), []).append(bucket)

    def key(self, bucket: Bucket) -> Bucket:
        """Return the same bucket for all members of a group."""
        sizes = {a: min(n, _ANY) if a in self._axes else n for a, n in bucket.items()}
        return Bucket(**sizes)

    def sizes_of(self, bucket: Bucket) -> SymbolicSizes | None:
        """Return what a bucket shares with its group; None if it is the only member.

        May call `make_inputs` for several buckets, which may return views of the same memory: make
        the inputs to run on afterwards.
        """
        key = self.key(bucket)
        if all(other == bucket for other in self._members.get(key, ())):
            return None
        if key not in self._sizes:
            others = [*self._inputs_of_others(bucket)]
            dims = _varying_dims(self._make_inputs(bucket), others)
            axes = (a if a in self._axes and n == _ANY else f"{a}={n}" for a, n in key.items())
            self._sizes[key] = SymbolicSizes(f"{self._name}[{' '.join(axes)}]", dims, self._runs)
        return self._sizes[key]

    def clear(self) -> None:
        """Release the shared graphs."""
        self._sizes.clear()

    def _inputs_of_others(self, bucket: Bucket) -> Iterator[Sequence[Input]]:
        # For each symbolic axis one member with another size.
        members = self._members[self.key(bucket)]
        for axis in sorted(self._axes):
            other = next((each for each in members if each[axis] != bucket[axis]), None)
            if other is not None:
                with contextlib.suppress(Exception), torch.no_grad():  # its own capture says why
                    yield self._make_inputs(other)


def _varying_dims(
    inputs: Sequence[Input], others: Sequence[Sequence[Input]]
) -> list[tuple[int, ...]]:
    """For each input, the dimensions of at least 2 whose size differs in the inputs of `others`."""
    return [
        tuple(
            dim
            for dim, size in enumerate(value.shape)
            if size > 1 and any(size != _size(other, index, dim, value) for other in others)
        )
        if isinstance(value, Tensor)
        else ()
        for index, value in enumerate(inputs)
    ]


def _size(others: Sequence[Input], index: int, dim: int, like: Tensor) -> int:
    other = others[index] if index < len(others) else None
    is_alike = isinstance(other, Tensor) and other.dim() == like.dim()
    return other.shape[dim] if is_alike else like.shape[dim]  # type: ignore[union-attr]
