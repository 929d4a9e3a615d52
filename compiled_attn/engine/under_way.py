"""The steps of an engine that an executor has begun: one, or on a device the next one as well."""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from compiled_attn.engine.block_memory import BlockMemory
from compiled_attn.engine.draws import NOT_FINITE
from compiled_attn.engine.executor import Executor, FittedStep
from compiled_attn.engine.logprobs import ScoredToken
from compiled_attn.engine.outcome import Outcome, outcome_of
from compiled_attn.engine.scheduler import Scheduler
from compiled_attn.engine.sequence import Sequence
from compiled_attn.engine.tally import StepRecord
from graphs import no_compile

__all__ = ["StepsUnderWay"]


class BegunStep(NamedTuple):
    """A step that an executor computes.

    Args:
        step: what it computes.
        rows: what comes of it; to read them waits for it.
        started_s: when it was planned, on the clock of `time.perf_counter`.
    """

    step: FittedStep
    rows: SequenceOf[int | str | ScoredToken]
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
            self._memory.pool.places.num_used,
            self._memory.pool.highest_used,
            step.wanted,
            nonfinite_rows=rows.count(NOT_FINITE),
        )
        return outcome_of(number, step.parts, rows, now, record)

    def forget(self) -> None:
        """Gives up what has begun: its requests are computed again."""
        self._begun = None

    def _begin(self, ending: Collection[Sequence] = ()) -> BegunStep | None:
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
