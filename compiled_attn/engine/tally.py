"""The counters of an engine while it serves, in a fixed amount of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from graphs import Bucket
from graphs.buckets.recorded import RecordedSizes

if TYPE_CHECKING:
    from compiled_attn.engine.sizing import Sizing

__all__ = ["BINS", "Percentiles", "Series", "StepRecord", "Tally", "bin_of", "quantile"]

_LEAST_S = 1e-6
_GROWTH = 1.02
_MOST = 1024  # points of a curve

BINS = 1280
"""Bins of a histogram: each is 2 % wide, from a microsecond to 28 hours.

The middle of a bin is within 1 % of everything in it (DDSketch, Masson et al., VLDB 2019).
"""


def bin_of(seconds: float) -> int:
    """Returns the bin of a duration; the outermost bins take all that is out of range."""
    if not seconds > _LEAST_S:
        return 0
    return int(min(BINS - 1, math.log(seconds / _LEAST_S) / math.log(_GROWTH)))


def quantile(counts: NDArray[np.float64], share: float) -> float:
    """Returns the duration in seconds that ``share`` of all do not exceed, within 1 %; 0 if none.

    Args:
        counts: ``[BINS]``, how many durations fell into each bin.
        share: quantile, 0 to 1.
    """
    total = counts.sum()
    if not total:
        return 0.0
    rank = max(1.0, math.ceil(share * total))
    return float(_LEAST_S * _GROWTH ** (int(np.searchsorted(counts.cumsum(), rank)) + 0.5))


class Series:
    """Every n-th point of a curve, n doubling whenever there are more than a thousand."""

    def __init__(self) -> None:
        self._every = 1
        self._count = 0
        self._points: list[tuple[float, ...]] = []

    def put(self, *point: float) -> None:
        """Adds the next point of the curve."""
        if self._count % self._every == 0:
            self._points.append(point)
        self._count += 1
        if len(self._points) > _MOST:
            self._every, self._points = 2 * self._every, self._points[::2]

    def columns(self) -> list[tuple[float, ...]]:
        """Returns the points column by column; none if there is no point."""
        return list(zip(*self._points, strict=True))


_OF_STEP = ("seconds", "requests", "failed_requests", "generated_tokens", "nonfinite_rows")
_of_step = attrgetter(*_OF_STEP)
_AXES = ("tokens", "shared", "unique")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median, 99th percentile and maximum of durations in milliseconds (0 if there is none).

    The percentiles are within 1 %, the maximum is exact.
    """

    p50: float
    p99: float
    max: float

    @staticmethod
    def of(counts: NDArray[np.float64], most_s: float) -> Percentiles:
        """Computes percentiles of a histogram of durations, whose maximum is known."""
        p50, p99 = (min(quantile(counts, share), most_s) for share in (0.5, 0.99))
        return Percentiles(*(round(seconds * 1e3, 3) for seconds in (p50, p99, most_s)))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: the sizes it needed, the bucket it ran in, and its seconds on the host's clock.

    Args:
        blocks_used: blocks in use; ``highest_used`` is the highest of them.
        uncut_need: sizes that the whole scheduled step needed, which are larger if it was cut.
        ttft_s: times to first token in this step.
        requests: how many finished, failed ones included.
        nonfinite_rows: rows whose logits were not finite.
        drafts: tokens of each draft, and how many of them a request was continued with.
    """

    need: Mapping[str, int]
    bucket: Bucket
    seconds: float
    blocks_used: int = 0
    highest_used: int = 0
    uncut_need: Mapping[str, int] = field(default_factory=dict)
    generated_tokens: int = 0
    ttft_s: tuple[float, ...] = ()
    requests: int = 0
    failed_requests: int = 0
    nonfinite_rows: int = 0
    drafts: tuple[tuple[int, int], ...] = ()


class Tally:
    """Sums, histograms and a thinned-out series of all steps; its size does not grow.

    All numbers are one array, and a step is one addition to it.

    Args:
        cost: relative cost of a bucket.
        recorded: counts the needs in a file, too.
        longest_draft: tokens of a draft at most.

    Attributes:
        blocks: blocks in use and the highest of them, over the busy seconds.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        cost: Callable[[Bucket], float],
        recorded: RecordedSizes | None = None,
        longest_draft: int = 0,
    ) -> None:
        self.longest_draft = longest_draft
        self.blocks = Series()
        self.last: StepRecord | None = None
        self._cost = cost
        self._recorded = recorded
        self._row_of = {bucket: row for row, bucket in enumerate(buckets)}
        sizes = (f"{kind} {axis}" for kind in ("need", "bucket") for axis in _AXES)
        places = range(1, 1 + longest_draft)
        drafts = (f"{kind} {place}" for kind in ("drafted", "accepted") for place in places)
        names = ["steps", "cut_steps", *_OF_STEP, *sizes, *drafts]
        self._index = {name: at for at, name in enumerate(names)}
        # After the names: the histogram of first tokens, then of each bucket cost and histogram.
        self._first = len(names)
        self._per_bucket = self._first + BINS
        self._sums = np.zeros(self._per_bucket + len(buckets) * (1 + BINS))
        self._longest = np.zeros(1 + len(buckets))  # to a first token, then a step of each bucket

    @classmethod
    def of(cls, sizing: Sizing, longest_draft: int) -> Tally:
        """Returns an empty one for the buckets of an engine."""
        return cls([*sizing.buckets], sizing.buckets.cost, sizing.recorded, longest_draft)

    def __getitem__(self, name: str) -> float:
        """Returns a sum by its name: steps, seconds, generated_tokens, need tokens, ..."""
        return float(self._sums[self._index[name]])

    def count(self, name: str) -> int:
        """Returns a sum that is a whole number."""
        return int(self[name])

    def add(self, step: StepRecord) -> None:
        """Counts a step."""
        row = self._row_of[step.bucket]
        at, amounts = self._changes(step, row)
        longest = max(step.ttft_s, default=0.0)
        self.last = step
        np.maximum.at(self._longest, np.array([0, 1 + row]), (longest, step.seconds))
        self.blocks.put(self["seconds"] + step.seconds, step.blocks_used, step.highest_used)
        np.add.at(self._sums, at, amounts)
        if self._recorded is not None:
            self._recorded.add(tuple([step.need[name] for name in self._recorded.names]))

    def count_failure(self) -> None:
        """Counts a request that ended with an error before its first step."""
        at = [self._index["requests"], self._index["failed_requests"]]
        np.add.at(self._sums, np.array(at), 1)

    def _changes(self, step: StepRecord, row: int) -> tuple[list[int], list[float]]:
        """What a step adds: positions in the array, and the amount at each."""
        is_cut = bool(step.uncut_need) and dict(step.uncut_need) != dict(step.need)
        bucket, start = dict(step.bucket), self._start(row)
        needed = self._cost(Bucket(**{name: step.need[name] for name in bucket}))
        bins = [self._first + bin_of(seconds) for seconds in step.ttft_s]
        at = [*range(self._first), *bins, start, start + 1 + bin_of(step.seconds)]
        named = [1.0, is_cut, *_of_step(step)]
        sizes = [sizes.get(axis, 0) for sizes in (step.need, bucket) for axis in _AXES]
        drafts = [
            float(sum(draft[kind] >= place for draft in step.drafts))
            for kind in (0, 1)
            for place in range(1, 1 + self.longest_draft)
        ]
        return at, [*named, *sizes, *drafts, *[1.0] * len(bins), needed, 1.0]

    @property
    def ttft_ms(self) -> Percentiles:
        """Times to first token."""
        return Percentiles.of(self._sums[self._first : self._per_bucket], float(self._longest[0]))

    @property
    def step_ms(self) -> Percentiles:
        """Times of all steps."""
        steps = self._sums[self._per_bucket :].reshape(-1, 1 + BINS)[:, 1:].sum(0)
        return Percentiles.of(steps, float(self._longest[1:].max(initial=0.0)))

    def drafts(self) -> dict[str, list[int]]:
        """Returns how many tokens were drafted and accepted, at each position of a draft."""
        places = range(1, 1 + self.longest_draft)
        return {
            kind: [self.count(f"{kind} {place}") for place in places]
            for kind in ("drafted", "accepted")
        }

    def padding_waste(self) -> dict[str, float]:
        """Computes the padded share of all tokens and blocks that the steps computed.

        The native kernel reads no padded blocks.
        """

        def share(*axes: str) -> float:
            needed, computed = (
                sum(self[f"{kind} {axis}"] for axis in axes) for kind in ("need", "bucket")
            )
            return round(1 - needed / computed, 4) if computed else 0.0

        return {"tokens": share("tokens"), "blocks": share("shared", "unique")}

    def of_bucket(self, bucket: Bucket) -> tuple[int, float | None, Percentiles]:
        """Returns how many steps ran in a bucket, the padded share of their cost, and their times.

        The share is None if there was no step.
        """
        row = self._row_of[bucket]
        start = self._start(row)
        needed, counts = float(self._sums[start]), self._sums[start + 1 : start + 1 + BINS]
        steps = int(counts.sum())
        waste = round(max(0.0, 1 - needed / (self._cost(bucket) * steps)), 4) if steps else None
        return steps, waste, Percentiles.of(counts, float(self._longest[1 + row]))

    def _start(self, row: int) -> int:
        return self._per_bucket + row * (1 + BINS)
