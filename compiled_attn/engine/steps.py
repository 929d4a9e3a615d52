"""The steps of an engine: begun, the outcome of each decided before anything changes, made true."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import NamedTuple

from compiled_attn.engine.block_memory import BlockMemory
from compiled_attn.engine.executor import Executor, FittedStep
from compiled_attn.engine.logprobs import ScoredToken
from compiled_attn.engine.request_state import Mailbox, RequestState, Status, TokenEvent
from compiled_attn.engine.sampler import NOT_FINITE
from compiled_attn.engine.scheduler import ScheduledStep, Scheduler
from compiled_attn.engine.tally import StepRecord, Tally
from graphs import no_compile

__all__ = ["Attempt", "Changes", "Outcome", "StepsUnderWay", "outcome_of"]


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
    tokens: list[tuple[RequestState, int, int]] = field(default_factory=list)
    scored: list[tuple[RequestState, int, int, ScoredToken]] = field(default_factory=list)
    mail: defaultdict[Mailbox[TokenEvent], dict[Hashable, TokenEvent]] = field(
        default_factory=partial(defaultdict, dict)
    )
    ended: list[tuple[RequestState, bool]] = field(default_factory=list)

    def make_true(self, requests: MutableMapping[int, RequestState], tally: Tally) -> None:
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

    def tell(self, sequence: RequestState, event: TokenEvent) -> None:
        """Adds what is told of a sequence."""
        self.mail[sequence.mailbox][self.number, sequence.request_id] = event
        if event.result is not None:
            self.ended.append((sequence, event.token is None))


def outcome_of(
    number: int,
    step: ScheduledStep,
    rows: Sequence[int | str | ScoredToken],
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
        except Exception as error:  # in its stop strings or its grammar: nobody else's
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


class BegunStep(NamedTuple):
    """A step that an executor computes.

    Args:
        step: what it computes.
        rows: what comes of it; to read them waits for it.
        started_s: when it was planned, on the clock of `time.perf_counter`.
    """

    step: FittedStep
    rows: Sequence[int | str | ScoredToken]
    started_s: float


class StepsUnderWay:
    """Plans steps, has them computed, and tells what comes of them, in order.

    Where the executor can look ahead, a step is planned and begun before the tokens of the one
    before are read, so that a device always has something to do. It is planned as if no request
    ended but by its length; what it computes of one that did is not looked at. There is no
    look-ahead behind a step whose tokens the host samples, and none where blocks are so scarce that
    a request might have to give up its own.

    Args:
        executor: what computes them.
        memory: the blocks of the requests.
        scheduler: what decides each step.
        sentinel: armed while a step is planned and computed.

    Attributes:
        ahead: how many steps began before the tokens of the one before were read.
    """

    def __init__(
        self, executor: Executor, memory: BlockMemory, scheduler: Scheduler, sentinel: no_compile
    ) -> None:
        self._executor, self._memory = executor, memory
        self._scheduler, self._sentinel = scheduler, sentinel
        self._begun: BegunStep | None = None
        self._told_s = 0.0
        self.ahead = 0

    def outcome(self, number: int) -> Outcome:
        """What comes of the next step, whose number is given; its requests have not changed yet.

        Raises:
            graphs.BucketOverflow, graphs.GraphBudgetExceeded: see `Executor.fit` and the sentinel.
        """
        with self._sentinel:
            begun = self._begun or self._begin()
            assert begun is not None, "a step was asked for without work"
            self._begun = self._begin_after(begun)
            rows = [*begun.rows]
        step, started, now = begun.step, max(begun.started_s, self._told_s), time.perf_counter()
        self._told_s = now
        record = StepRecord(
            step.plan.need,
            step.bucket,
            now - started,
            self._memory.pool.num_used,
            self._memory.pool.highest_used,
            step.wanted,
            nonfinite_rows=rows.count(NOT_FINITE),
        )
        return outcome_of(number, step.parts, rows, now, record)

    def forget(self) -> None:
        """Gives up what has begun: its requests are computed again."""
        self._begun = None

    def _begin(self, ending: Collection[RequestState] = ()) -> BegunStep | None:
        started = time.perf_counter()
        scheduled = self._scheduler.schedule(ending)
        if not scheduled:
            return None
        self._memory.settle()
        ids = (sequence.request_id for sequence in scheduled.sequences)
        step = self._executor.fit(scheduled, self._memory.tables(ids, self._scheduler.changed))
        return BegunStep(step, self._executor.run(step), started)

    def _begin_after(self, begun: BegunStep) -> BegunStep | None:
        """The step behind one that is being computed, where there can be one."""
        if not self._executor.looks_ahead or not self._scheduler.can_look_ahead:
            return None
        parts = begun.step.parts
        if not all(parts.sequences[at].sampling.only_draws for at in parts.special):
            return None
        after = self._begin(self._scheduler.advance(parts))
        self.ahead += after is not None
        return after
