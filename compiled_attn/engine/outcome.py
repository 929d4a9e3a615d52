"""The outcome of a step, decided before anything changes and then made true, once."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from compiled_attn.engine.block_memory import BlockMemory
from compiled_attn.engine.mailbox import Mailbox
from compiled_attn.engine.scheduler import ScheduledTokens, Scheduler
from compiled_attn.engine.sequence import Sequence, TokenEvent
from compiled_attn.engine.tally import StepRecord, Tally

__all__ = ["Outcome", "outcome_of"]


@dataclass(slots=True)
class Outcome:
    """A computed step: from the moment that the engine has it the step was done.

    Args:
        number: of the step, from 0 on.
        now_s: when, on the clock of `time.perf_counter`.
        record: its figures.
        computed: tokens that later prompts may share.
        tokens: sequences with the place and the id of their next token.
        mail: the events of each mailbox under their keys.
        ended: sequences that end here, and whether with an error.
    """

    number: int
    now_s: float
    record: StepRecord
    computed: list[ScheduledTokens] = field(default_factory=list)
    tokens: list[tuple[Sequence, int, int]] = field(default_factory=list)
    mail: dict[Mailbox[TokenEvent], dict[Hashable, TokenEvent]] = field(default_factory=dict)
    ended: list[tuple[Sequence, bool]] = field(default_factory=list)

    def make_true(self, requests: MutableMapping[int, Sequence], tally: Tally) -> None:
        """Hands out tokens and events, and ends what has ended; once more changes nothing."""
        for sequence, place, token in self.tokens:
            sequence.take(place, token, self.now_s)
        for mailbox, events in self.mail.items():
            mailbox.put(events)
        for sequence, _ in self.ended:
            requests.pop(sequence.request_id, None)
        tally.add(self.number, self.record)

    def release(self, scheduler: Scheduler, memory: BlockMemory) -> None:
        """Lets later prompts share what was computed, and frees the blocks of what has ended.

        Of a sequence that failed only what it found, and is finite, stays.
        """
        for part in self.computed:
            scheduler.commit(part)
        for sequence, has_failed in self.ended:
            sound = memory.sound_hits(sequence.request_id) if has_failed else None
            scheduler.finish(sequence, sound_blocks=sound)

    def tell(self, sequence: Sequence, event: TokenEvent) -> None:
        """Adds what is told of a sequence."""
        mail = self.mail.setdefault(sequence.mailbox, {})
        mail[self.number, sequence.request_id] = event
        if event.result is not None:
            self.ended.append((sequence, event.token is None))


def outcome_of(
    number: int,
    parts: SequenceOf[ScheduledTokens],
    rows: SequenceOf[int | str],
    now_s: float,
    record: StepRecord,
) -> Outcome:
    """What the next tokens of a step come to; changes nothing but the outcome.

    Args:
        number: of the step.
        parts: what it computed.
        rows: for each part the token after it, or why there is none.
        now_s: the time.
        record: figures of the step, to which those of its tokens are added.
    """
    outcome, ttft_s = Outcome(number, now_s, record), []
    for part, row in zip(parts, rows, strict=True):
        sequence = part.sequence
        if isinstance(row, str):
            outcome.tell(sequence, sequence.failure(row, now_s))
            continue
        outcome.computed.append(part)
        if not part.wants_logits:
            continue
        if not sequence.generated:
            ttft_s.append(now_s - sequence.arrived_s)
        outcome.tell(sequence, sequence.event(row, now_s))
        outcome.tokens.append((sequence, len(sequence.tokens), row))
    outcome.record = replace(
        record,
        generated_tokens=len(outcome.tokens),
        ttft_s=tuple(ttft_s),
        requests=len(outcome.ended),
        failed_requests=len(parts) - len(outcome.computed),
    )
    return outcome
