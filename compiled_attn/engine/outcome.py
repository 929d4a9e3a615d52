"""What came of a step, decided before anything changes and then made true, once."""

from __future__ import annotations

from collections.abc import MutableMapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from compiled_attn.engine.scheduler import ScheduledTokens, Scheduler
from compiled_attn.engine.sequence import Sequence, TokenEvent
from compiled_attn.engine.tally import StepRecord, Tally

__all__ = ["Outcome", "PartOutcome", "outcome_of"]


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """What came of the tokens of one sequence.

    Args:
        part: the tokens.
        place: how many tokens the sequence had: where the next one goes.
        event: what is told of it; None: the prompt goes on.
    """

    part: ScheduledTokens
    place: int
    event: TokenEvent | None

    @property
    def has_failed(self) -> bool:
        """Whether the sequence ends here with an error."""
        return self.event is not None and self.event.token is None

    @property
    def is_last(self) -> bool:
        """Whether the sequence ends here."""
        return self.event is not None and self.event.result is not None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A computed step: from the moment that it exists the step was done.

    Args:
        number: of the step, from 0 on.
        parts: what came of each sequence.
        now_s: when, on the clock of `time.perf_counter`.
        record: its figures.
    """

    number: int
    parts: list[PartOutcome]
    now_s: float
    record: StepRecord

    def make_true(self, requests: MutableMapping[int, Sequence], tally: Tally) -> None:
        """Hands out tokens and events, and ends what has ended; once more changes nothing."""
        for part in self.parts:
            event, sequence = part.event, part.part.sequence
            if event is None:
                continue
            if event.token is not None:
                sequence.take(part.place, event.token, self.now_s)
            sequence.mailbox.put([((self.number, sequence.request_id), event)])
            if part.is_last:
                requests.pop(sequence.request_id, None)
        tally.add(self.number, self.record)

    def release(self, scheduler: Scheduler) -> None:
        """Lets later prompts share what was computed, and frees the blocks of what has ended."""
        for part in self.parts:
            if not part.has_failed:
                scheduler.commit(part.part)
            if part.is_last:
                scheduler.finish(part.part.sequence, is_sound=not part.has_failed)


def outcome_of(
    number: int,
    parts: SequenceOf[ScheduledTokens],
    rows: SequenceOf[int | str],
    now_s: float,
    record: StepRecord,
) -> Outcome:
    """What the next tokens of a step come to; changes nothing.

    Args:
        number: of the step.
        parts: what it computed.
        rows: for each part the token after it, or why there is none.
        now_s: the time.
        record: figures of the step, to which those of its tokens are added.
    """
    decided = [_part(part, row, now_s) for part, row in zip(parts, rows, strict=True)]
    started = [
        now_s - part.part.sequence.arrived_s
        for part in decided
        if part.event and part.event.token is not None and not part.part.sequence.generated
    ]
    record = replace(
        record,
        generated_tokens=sum(p.event is not None and not p.has_failed for p in decided),
        ttft_s=tuple(started),
        requests=sum(part.is_last for part in decided),
        failed_requests=sum(part.has_failed for part in decided),
    )
    return Outcome(number, decided, now_s, record)


def _part(part: ScheduledTokens, row: int | str, now_s: float) -> PartOutcome:
    sequence = part.sequence
    event = None
    if isinstance(row, str):
        event = sequence.failure(row, now_s)
    elif part.wants_logits:
        event = sequence.event(row, now_s)
    return PartOutcome(part, len(sequence.tokens), event)
