"""Whether drafts pay: measured times of steps, and the measured share of accepted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from graphs import Bucket, BucketOverflow, BucketSpace

__all__ = ["Acceptance", "StepCosts", "lengths_of_drafts"]

_MARGIN = 1.03  # by which a step with drafts must be better, since times are noisy
_SLOW, _DRIFT = 0.1, 0.01
_FORGET = 0.9


class StepCosts:
    """Estimates the seconds of a step of one to ``most`` rows, each with a token and its logits.

    Each bucket has a moving average; what the warmup measured is its start. The estimates of
    buckets that are not in use drift to the one that is, times the ratio of the warmup, so that
    none stays wrong.

    Args:
        buckets: over tokens and requests.
        runs: seconds that the warmup measured, of any of them.
    """

    def __init__(self, buckets: BucketSpace, runs: Mapping[Bucket, float]) -> None:
        found: list[Bucket] = []
        most = max((min(each["tokens"], each["requests"]) for each in buckets), default=0)
        for rows in range(1, most + 1):
            try:
                found.append(buckets.pick(tokens=rows, requests=rows))
            except BucketOverflow:
                break
        self.most = len(found)
        known = [*dict.fromkeys(found)]
        self._number = {bucket: number for number, bucket in enumerate(known)}
        self._of_rows = np.array([self._number[bucket] for bucket in found], np.int64)
        measured = [runs.get(bucket, 0.0) for bucket in known]
        self._warm = np.array(measured if all(measured) else [1.0] * len(known))
        self._seconds = self._warm.copy()
        self._samples = [0] * len(known)

    def add(self, bucket: Bucket, seconds: float) -> None:
        """Counts a step of one row for each token."""
        if (number := self._number.get(bucket)) is None:
            return
        before, samples = float(self._seconds[number]), self._samples[number]
        if samples:
            seconds = min(seconds, 3 * before)  # another process had the processor
        share = max(_SLOW, 1 / (1 + samples))
        now = before + share * (seconds - before)
        # The first sample of all sets the scale: a warmup reads no context and samples nothing.
        drift = _DRIFT if any(self._samples) else 1.0
        self._samples[number] = samples + 1
        self._seconds += drift * (self._warm * (now / self._warm[number]) - self._seconds)
        self._seconds[number] = now

    def is_known(self, rows: int) -> bool:
        """Whether a step of so many rows was measured."""
        number = int(self._of_rows[rows - 1])
        return self._samples[number] > 0

    def seconds(self, rows: int, more: int) -> NDArray[np.float64]:
        """Returns the estimates for ``rows``, ``rows + 1`` .. ``rows + more`` rows."""
        found: NDArray[np.float64] = self._seconds[self._of_rows[rows - 1 : rows + more]]
        return found


class Acceptance:
    """The probability that a token of a draft is accepted if those before it are.

    Older counts weigh less.
    """

    __slots__ = ("accepted", "refused")

    def __init__(self, accepted: float = 0.0, refused: float = 0.0) -> None:
        self.accepted, self.refused = accepted, refused

    def add(self, drafted: int, accepted: int) -> None:
        """Counts a draft."""
        self.accepted = _FORGET * self.accepted + accepted
        self.refused = _FORGET * self.refused + (accepted < drafted)

    def probability(self, prior: float, weight: float = 1.0) -> float:
        """Returns the estimate, with ``weight`` observations of a prior probability."""
        total = self.accepted + self.refused + weight
        return (self.accepted + weight * prior) / total


def lengths_of_drafts(
    rows: int,
    probabilities: Sequence[float],
    longest: Sequence[int],
    seconds: NDArray[np.float64],
    extra: NDArray[np.float64] | None = None,
) -> list[int]:
    """Chooses the lengths of drafts that yield most tokens a second; all 0: none pays.

    Args:
        rows: requests of the step.
        probabilities: ``[n]``, see `Acceptance`, of those that may have drafts.
        longest: ``[n]``, tokens that each may have.
        seconds: ``[1 + m]``, of the step with 0 .. m tokens of drafts.
        extra: ``[1 + longest draft]``, seconds that making drafts of so many tokens takes; None:
            nothing.
    """
    counts = np.array(longest, np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    likely = np.minimum(np.array(probabilities), 0.99)[owner] ** place
    order = np.argsort(-likely, kind="stable")[: len(seconds) - 1]
    tokens = rows + np.concatenate([[0.0], np.cumsum(likely[order])])
    taken = seconds[: len(tokens)]
    if extra is not None:
        deepest = np.maximum.accumulate(place[order])
        taken = taken + np.concatenate([[0.0], extra[deepest]])
    rate = tokens / taken
    best = int(rate.argmax())
    if rate[best] < _MARGIN * rate[0]:
        best = 0
    lengths: list[int] = np.bincount(owner[order[:best]], minlength=len(counts)).tolist()
    return lengths
