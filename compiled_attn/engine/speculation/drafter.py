"""Decides which requests get drafts, and how long they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.speculation.gain import Acceptance, StepCosts, lengths_of_drafts
from compiled_attn.engine.speculation.ngrams import LONGEST_NGRAM, continuation
from compiled_attn.engine.speculation.state import DraftState
from graphs import Bucket, BucketSpace, WarmupReport

__all__ = ["DraftSource", "Drafter", "Ngrams"]

_FIRST_WAIT, _LAST_WAIT = 16, 128  # steps
_PROBE = 2  # tokens
_IDLE = 8  # steps

_Counts = tuple[int, int]  # drafted, accepted


class DraftSource(Protocol):
    """Makes drafts; each is of a kind, whose drafts have a common share of accepted tokens.

    Attributes:
        seconds_per_token: that drafts of all requests of a step take for each of their places.
    """

    seconds_per_token: float

    def warmup(self, progress: Callable[..., None] | None) -> None:
        """Captures what it needs."""

    def kind(self, sequence: RequestState, state: DraftState) -> int:
        """Returns the kind of draft that a request may have, from 1 on; 0: it has none."""

    def drafts(self, lengths: Mapping[RequestState, int]) -> dict[RequestState, list[int]]:
        """Makes drafts of at most these lengths, after `kind` was called for each request."""


class Ngrams:
    """Drafts from the tokens of each request, see `NgramIndex`."""

    seconds_per_token = 0.0

    def warmup(self, progress: Callable[..., None] | None) -> None:
        """See `DraftSource.warmup`: nothing is captured."""

    def kind(self, sequence: RequestState, state: DraftState) -> int:
        """See `DraftSource.kind`: the length of the n-gram that was found."""
        length, state.found = state.index.find(sequence.tokens)
        return length

    def drafts(self, lengths: Mapping[RequestState, int]) -> dict[RequestState, list[int]]:
        """See `DraftSource.drafts`."""
        return {
            each: continuation(each.tokens, each.drafting.found, count)
            for each, count in lengths.items()
            if each.drafting is not None
        }


class _Candidate(NamedTuple):
    sequence: RequestState
    probability: float
    longest: int


class Drafter:
    """Chooses drafts such that steps that only decode are faster than without.

    The choice follows from measured times of steps and measured shares of accepted tokens, so a
    request whose drafts are refused gets none; now and then it gets a short one again. In a step
    that also computes prompts, where a token more takes no longer, the same drafts pay.

    Args:
        most: tokens of a draft at most.
    """

    def __init__(self, source: DraftSource, most: int) -> None:
        self._source, self._most = source, most
        self._costs: StepCosts | None = None
        # A first guess, which two refused drafts outweigh.
        self._priors = [Acceptance(2.0, 1.0) for _ in range(LONGEST_NGRAM + 1)]
        self._skipped, self._wait = 0, _FIRST_WAIT
        self._idle = 0
        self._spent_s = 0.0
        self._places = np.arange(1 + most, dtype=np.float64)
        self._is_probe = False

    def begin(
        self,
        buckets: BucketSpace,
        warmup: WarmupReport | None,
        progress: Callable[..., None] | None = None,
    ) -> None:
        """Starts with the times that a warmup of these buckets measured; warms up the source."""
        self._source.warmup(progress)
        results = warmup.results if warmup else ()
        runs = {each.bucket: each.run_seconds for each in results if each.run_seconds}
        self._costs = StepCosts(buckets, runs)

    @property
    def is_idle(self) -> bool:
        """Whether the last steps had no draft, so that the next one may be scheduled ahead.

        False now and then, as a step that is scheduled ahead has no drafts.
        """
        return self._idle >= _IDLE and self._idle % _LAST_WAIT >= _IDLE

    def draft(
        self, sequences: Sequence[RequestState], room: int
    ) -> Mapping[RequestState, Sequence[int]]:
        """Returns drafts for some of the requests of a step, with at most ``room`` tokens.

        Args:
            sequences: each computes its last token in the step.
        """
        self._idle += 1
        self._spent_s = 0.0
        rows, costs = len(sequences), self._costs
        room = 0 if costs is None else min(room, costs.most - rows)
        if costs is None or room < 1 or not costs.is_known(rows):
            return {}
        candidates = [found for each in sequences if (found := self._candidate(each)) is not None]
        if not candidates:
            return {}
        lengths = lengths_of_drafts(
            rows,
            [each.probability for each in candidates],
            [each.longest for each in candidates],
            costs.seconds(rows, room),
            np.asarray(self._source.seconds_per_token * self._places, np.float64),
        )
        self._is_probe = self._is_due(lengths)
        if self._is_probe:
            room -= sum(lengths)
            for at, each in enumerate(candidates):
                if not lengths[at]:
                    lengths[at] = min(_PROBE, each.longest, max(0, room))
                    room -= lengths[at]
        chosen = zip(candidates, lengths, strict=True)
        wanted = {each.sequence: length for each, length in chosen if length}
        if not wanted:
            return {}
        self._idle = 0
        started = time.perf_counter()
        drafts = self._source.drafts(wanted)
        self._spent_s = time.perf_counter() - started
        return drafts

    def add(
        self, bucket: Bucket | None, seconds: float, drafts: Mapping[RequestState, _Counts]
    ) -> None:
        """Counts the drafted and accepted tokens of a step, and its time if it only decoded.

        Args:
            bucket: that of the step; None: it also computed prompts.
        """
        if self._costs is not None and bucket is not None:
            self._costs.add(bucket, seconds - self._spent_s)
        for sequence, (drafted, accepted) in drafts.items():
            if (state := sequence.drafting) is not None:
                state.acceptance.add(drafted, accepted)
                self._priors[state.kind].add(drafted, accepted)
        if drafts and self._is_probe:
            drafted, accepted = (sum(each) for each in zip(*drafts.values(), strict=True))
            is_better = 2 * accepted >= drafted
            self._wait = _FIRST_WAIT if is_better else min(2 * self._wait, _LAST_WAIT)

    def _candidate(self, sequence: RequestState) -> _Candidate | None:
        longest = min(self._most, sequence.sampling.max_new_tokens - sequence.generated - 1)
        if longest < 1 or sequence.computed != len(sequence.tokens) - 1:
            return None
        if (state := sequence.drafting) is None:
            state = sequence.drafting = DraftState()
        state.kind = self._source.kind(sequence, state)
        if not state.kind:
            return None
        prior = self._priors[state.kind].probability(0.5)
        return _Candidate(sequence, state.acceptance.probability(prior), longest)

    def _is_due(self, lengths: Sequence[int]) -> bool:
        """Whether it is time to try drafts that do not pay by the estimates."""
        if all(lengths):
            return False
        self._skipped += 1
        if self._skipped < self._wait:
            return False
        self._skipped = 0
        return True
