"""The outcome of a step, decided before anything changes, and changes that happen or do not."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, MutableMapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType

from compiled_attn.engine.block_memory import BlockMemory
from compiled_attn.engine.logprobs import ScoredToken
from compiled_attn.engine.scheduler import ScheduledStep, Scheduler
from compiled_attn.engine.sequence import Mailbox, Sequence, Status, TokenEvent
from compiled_attn.engine.tally import StepRecord, Tally

__all__ = ["Attempt", "Changes", "Outcome", "outcome_of"]


@dataclass(slots=True)
class Outcome:
    """A computed step: from the moment that the engine has it the step was done.

    Args:
        number: of the step, from 0 on.
        now_s: when, on the clock of `time.perf_counter`.
        record: its figures.
        computed: what later prompts may share.
        tokens: sequences with the place and the id of their next token.
        scored: sequences with how much of them was computed, their tokens, and the scores of this
            step.
        mail: the events of each mailbox under their keys.
        ended: sequences that end here, and whether with an error.
    """

    number: int
    now_s: float
    record: StepRecord
    computed: ScheduledStep
    tokens: list[tuple[Sequence, int, int]] = field(default_factory=list)
    scored: list[tuple[Sequence, int, int, ScoredToken]] = field(default_factory=list)
    mail: defaultdict[Mailbox[TokenEvent], dict[Hashable, TokenEvent]] = field(
        default_factory=partial(defaultdict, dict)
    )
    ended: list[tuple[Sequence, bool]] = field(default_factory=list)

    def make_true(self, requests: MutableMapping[int, Sequence], tally: Tally) -> None:
        """Hands out tokens and events, and ends what has ended; once more changes nothing."""
        for sequence, place, token in self.tokens:
            sequence.take(place, token, self.now_s)
        for sequence, computed, place, scored in self.scored:
            sequence.take_scores(computed, place, scored)
        for mailbox, events in self.mail.items():
            mailbox.put(events)
        for sequence, _ in self.ended:
            requests.pop(sequence.request_id, None)
        tally.add(self.number, self.record)

    def release(self, scheduler: Scheduler, memory: BlockMemory) -> None:
        """Lets later prompts share what was computed, and frees the blocks of what has ended.

        Of a sequence that failed only what it found, and is finite, stays.
        """
        scheduler.commit(self.computed)
        for sequence, has_failed in self.ended:
            sound = memory.sound_hits(sequence.request_id) if has_failed else None
            scheduler.finish(sequence, sound_blocks=sound)

    def tell(self, sequence: Sequence, event: TokenEvent) -> None:
        """Adds what is told of a sequence."""
        self.mail[sequence.mailbox][self.number, sequence.request_id] = event
        if event.result is not None:
            self.ended.append((sequence, event.token is None))


def outcome_of(
    number: int,
    step: ScheduledStep,
    rows: SequenceOf[int | str | ScoredToken],
    now_s: float,
    record: StepRecord,
) -> Outcome:
    """What the next tokens of a step come to; changes nothing but the outcome.

    Args:
        number: of the step.
        step: what it computed.
        rows: for each sequence the token after it, or why there is none.
        now_s: the time.
        record: figures of the step, to which those of its tokens are added.
    """
    outcome, ttft_s = Outcome(number, now_s, record, step), []
    finished = {each for each in step.sequences if each.status is Status.FINISHED}
    parts = zip(step.sequences, step.counts, step.starts, rows, strict=True)
    for sequence, count, start, row in parts:
        if finished and sequence in finished:  # since the step began
            continue
        place = len(sequence.tokens)
        scored: ScoredToken | None = None
        if not isinstance(row, int):
            if isinstance(row, str):
                outcome.tell(sequence, sequence.failure(row, now_s))
                continue
            outcome.scored.append((sequence, start, place, row))
            scored, row = row, row.token
        if start + count < place:
            continue
        try:
            event = sequence.event(row, now_s, scored, start)
        except Exception as error:  # of its stop strings or its grammar: nobody else's
            reason = f"its end cannot be told: {type(error).__name__}: {error}"
            outcome.tell(sequence, sequence.failure(reason, now_s))
            continue
        if place == sequence.prompt_len:
            ttft_s.append(now_s - sequence.arrived_s)
        outcome.tell(sequence, event)
        outcome.tokens.append((sequence, place, row))
    failed = {sequence for sequence, has_failed in outcome.ended if has_failed}
    if gone := failed | finished:
        outcome.computed = step.without(gone)
    outcome.record = replace(
        record,
        generated_tokens=len(outcome.tokens),
        ttft_s=tuple(ttft_s),
        requests=len(outcome.ended),
        failed_requests=len(failed),
    )
    return outcome


@dataclass(slots=True)
class Attempt:
    """A change that has begun; with an outcome it is a step that was done."""

    outcome: Outcome | None = None


class Changes:
    """Runs changes of requests and blocks one at a time, and mends what an exception tore.

    Args:
        recover: given the outcome of the step that was done, or None; makes everything whole. It
            is called again if it was itself interrupted, so a second call must do no harm.
    """

    def __init__(self, recover: Callable[[Outcome | None], None]) -> None:
        self._recover = recover
        self._attempt: Attempt | None = None
        self._frame: FrameType | None = None

    @property
    def is_running(self) -> bool:
        """Whether a change is being made: by another thread, or by a caller of this call."""
        # The call itself, looked for on the stacks: a flag or a lock can be left set.
        frame = self._frame
        return frame is not None and _is_executing(frame)

    def refuse_second(self) -> None:
        """Raises RuntimeError while a change is being made."""
        if self.is_running:
            raise RuntimeError(
                "expected an engine that is not at work, got a call from within a step, or from "
                "another thread: let one thread step it"
            )

    def run(self, change: Callable[[Attempt], None]) -> None:
        """Makes a change; interrupted, it was done or is undone."""
        self._attempt = attempt = Attempt()
        self._frame = sys._getframe()
        try:
            change(attempt)
            self._attempt = None
        except BaseException:
            self.finish()
            raise
        self._frame = None

    def finish(self, *, is_whole: bool = True) -> None:
        """Recovers from what an exception left behind; ``is_whole`` False: in any case."""
        attempt = self._attempt
        if attempt is not None or not is_whole:
            self._recover(attempt.outcome if attempt else None)
            self._attempt = None


def _is_executing(frame: FrameType) -> bool:
    for top in sys._current_frames().values():
        caller: FrameType | None = top
        while caller is not None and caller is not frame:
            caller = caller.f_back
        if caller is frame:
            return True
    return False
