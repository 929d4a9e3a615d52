"""Runs the steps of an engine: plan, launch, compute the result, then commit it or roll back.

A step is a transaction: an exception rolls it back, Ctrl-C waits for its end.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from compiled_attn.engine.block_memory import BlockMemory
from compiled_attn.engine.executor import Executor, PlannedStep
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.request_state import RequestState, Status, TokenEvent
from compiled_attn.engine.sampler import NOT_FINITE
from compiled_attn.engine.scheduler import ScheduledStep, Scheduler
from compiled_attn.engine.tally import StepRecord, Tally
from compiled_attn.engine.watched import StepWatch, watched_cache
from graphs import no_compile

__all__ = ["StepResult", "StepRunner", "Transactions", "delayed_interrupt", "step_result"]


class _RequestResult(NamedTuple):
    """What a step yields for one request.

    Args:
        start: tokens that were computed before the step.
        event: event of the next token or the error; None for a chunk inside the prompt.
    """

    sequence: RequestState
    start: int
    length: int
    row: RowResult
    event: TokenEvent | None


@dataclass(slots=True)
class StepResult:
    """The result of a computed step, which changes nothing before it is committed.

    Args:
        step: the computed tokens that later prompts may share.
    """

    step: ScheduledStep
    now_s: float
    record: StepRecord
    requests: list[_RequestResult] = field(default_factory=list)

    def commit(
        self, requests: MutableMapping[int, RequestState], tally: Tally, scheduler: Scheduler
    ) -> None:
        """Appends tokens and events, then frees the blocks of finished requests.

        The exception of a signal handler may end the first part, which `complete` repeats; if the
        second fails, the blocks can be rebuilt from the requests.
        """
        finished = []
        for each in self.requests:
            sequence, start, length, row, event = each
            sequence.apply(row, start, length, self.now_s, event)
            if event is not None:
                sequence.events.append(event)
                if event.result is not None:
                    finished.append(each)
        for each in finished:
            del requests[each.sequence.request_id]
        tally.add(self.record)
        scheduler.commit(self.step)
        for each in finished:
            scheduler.finish(each.sequence, has_failed=bool(each.row.error))

    def complete(self, requests: MutableMapping[int, RequestState]) -> None:
        """Appends the tokens and events that an interrupted `commit` has not."""
        for sequence, start, length, row, event in self.requests:
            sequence.apply(row, start, length, self.now_s, event)
            if event is None:
                continue
            if not any(event is each for each in sequence.events):
                sequence.events.append(event)
            if event.result is not None:
                requests.pop(sequence.request_id, None)


def step_result(
    step: ScheduledStep, rows: Sequence[RowResult], now_s: float, record: StepRecord
) -> StepResult:
    """Computes the result of a step; changes nothing."""
    result, ttft_s = StepResult(step, now_s, record), []
    tokens = finishing = nonfinite = 0
    finished = {each for each in step.sequences if each.status is Status.FINISHED}
    failed: set[RequestState] = set()
    accepted: dict[RequestState, int] = {}
    parts = zip(step.sequences, step.counts, step.starts, rows, strict=True)
    for sequence, count, start, whole in parts:
        if finished and sequence in finished:  # since the step was launched
            continue
        reaches_end = start + count >= len(sequence.tokens)
        before: Sequence[RowResult] = ()
        for row in (whole, *whole.more) if whole.more else (whole,):
            has_token, reason = reaches_end, ""
            if has_token and row.token is not None:
                try:
                    earlier = _tokens(before) if before else ()
                    reason = sequence.finish_reason(row.token, earlier)
                except Exception as error:  # in its stop strings or its grammar
                    row = RowResult(error=f"its end is unknown: {type(error).__name__}: {error}")
            if row.token is None:
                failed.add(sequence)
                nonfinite += row.error is NOT_FINITE
                has_token, reason = False, "error"
            elif has_token:
                tokens += 1
                if len(sequence.tokens) == sequence.prompt_len and not before:
                    ttft_s.append(now_s - sequence.arrived_s)
            elif not row.prompt_logprobs:
                continue
            finishing += bool(reason)
            event = None
            if has_token or reason:
                event = sequence.event(row, start, now_s, reason, before)
            length = len(sequence.tokens) + len(before)
            result.requests.append(_RequestResult(sequence, start, length, row, event))
            if row.draft:
                accepted[sequence] = row.draft
            if reason or not whole.more:
                break
            before = (*before, row)
    if gone := failed | finished:
        result.step = step.without(gone)
    result.record = replace(
        record,
        generated_tokens=tokens,
        ttft_s=tuple(ttft_s),
        requests=finishing,
        failed_requests=len(failed),
        nonfinite_rows=nonfinite,
        drafts=tuple(
            (len(draft), accepted.get(sequence, 0)) for sequence, draft in step.drafts.items()
        ),
    )
    return result


def _tokens(rows: Sequence[RowResult]) -> list[int]:
    return [each.token for each in rows if each.token is not None]


class StepRunner:
    """Plans and launches steps, and computes their results, in order.

    With async scheduling, where the executor supports it, a step is planned and launched before the
    tokens of the previous one are read, so that a device always has work. The plan assumes that no
    request finishes except by its length; what is computed for one that did is ignored. The next
    step is not launched ahead if the host samples the tokens of this one, nor if blocks are so
    scarce that a request might be preempted.
    """

    def __init__(
        self, executor: Executor, memory: BlockMemory, scheduler: Scheduler, sentinel: no_compile
    ) -> None:
        self._executor, self._memory = executor, memory
        self._scheduler, self._sentinel = scheduler, sentinel
        self._launched: tuple[PlannedStep, Sequence[RowResult]] | None = None
        self._computed_s = 0.0
        self.ahead = 0
        self.watch: StepWatch | None = None
        if executor.config.sanitize:
            self.watch = StepWatch(watched_cache(executor))

    def compute(self) -> StepResult:
        """Computes the result of the next step; its requests have not changed yet."""
        with self._sentinel:
            launched = self._launched or self._launch(self._plan())
            assert launched is not None, "a step without work"
            step, rows = launched
            self._launched = self._launch_ahead(step)
            rows = [*rows]
        started, now = max(step.started_s, self._computed_s), time.perf_counter()
        self._computed_s = now
        pool = self._memory.pool
        record = StepRecord(
            step.plan.need,
            step.bucket,
            now - started,
            pool.num_used,
            pool.highest_used,
            step.uncut_need,
        )
        result = step_result(step.parts, rows, now, record)
        self._measure(step, rows, record)
        return result

    def rollback(self) -> None:
        """Forgets the launched step: its requests are computed again."""
        self._launched = None

    def _measure(self, step: PlannedStep, rows: Sequence[RowResult], record: StepRecord) -> None:
        """Shows the drafter which drafts were accepted, and what a step of decodes took."""
        drafter, needed = self._scheduler.drafter, step.plan.rows.logits
        if drafter is None:
            return
        pairs = zip(step.parts, rows, strict=True) if step.parts.drafts else ()
        drafts = {
            part.sequence: (len(part.draft), len(row.more)) for part, row in pairs if part.draft
        }
        only_decodes = int(needed.sum()) == len(step.plan.rows.tokens)
        drafter.add(record.bucket if only_decodes else None, record.seconds, drafts)

    def _plan(self, ending: Collection[RequestState] = ()) -> PlannedStep | None:
        started = time.perf_counter()
        scheduled = self._scheduler.schedule(ending)
        if not scheduled:
            return None
        self._memory.settle()
        ids = (sequence.request_id for sequence in scheduled.sequences)
        if self.watch is not None:
            self.watch.scheduled(scheduled, self._memory.pool)
        table = self._memory.tables(ids, self._scheduler.changed)
        return self._executor.plan(scheduled, table)._replace(started_s=started)

    def _launch(self, step: PlannedStep | None) -> tuple[PlannedStep, Sequence[RowResult]] | None:
        if step is None:
            return None
        self._memory.begin(step)
        if self.watch is None:
            return step, self._executor.launch(step)
        self.watch.before(step, self._memory.pool)
        try:
            rows = self._executor.launch(step)
        except Exception:
            self.watch.after()  # which may explain it better
            raise
        self.watch.after()
        return step, rows

    def _launch_ahead(self, step: PlannedStep) -> tuple[PlannedStep, Sequence[RowResult]] | None:
        is_ahead = self._executor.schedules_ahead and self.watch is None
        if not is_ahead or not self._scheduler.can_schedule_ahead:
            return None
        parts, drafter = step.parts, self._scheduler.drafter
        if drafter is not None and not drafter.is_idle:  # drafts need the tokens
            return None
        if not all(parts.sequences[at].sampling.only_samples for at in parts.special):
            return None
        launched = self._launch(self._plan(self._scheduler.advance(parts)))
        self.ahead += launched is not None
        return launched


class Transactions:
    """Runs transactions on requests and blocks, one at a time."""

    def __init__(self, rollback: Callable[[], None]) -> None:
        self._rollback = rollback
        self._lock = threading.RLock()
        self._is_running = False

    def run(self, transaction: Callable[[], None]) -> bool:
        """Runs a transaction, or rolls it back; False: another is running, so it does nothing."""
        with delayed_interrupt():
            if not self._lock.acquire(blocking=False):  # another thread
                return False
            try:
                if self._is_running:  # this thread, within a transaction
                    return False
                self._run(transaction)
            finally:
                self._lock.release()
        return True

    def _run(self, transaction: Callable[[], None]) -> None:
        try:
            self._is_running = True
            transaction()
        except BaseException:
            self._rollback()
            raise
        finally:
            self._is_running = False


@contextlib.contextmanager
def delayed_interrupt(undo: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Delays Ctrl-C to the end of the block; a second one interrupts at once.

    Either, like any exception in the block, is raised after ``undo``.
    Only the main thread receives signals: elsewhere this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    delays = threading.current_thread() is threading.main_thread() and callable(handler)
    received: list[tuple[Any, ...]] = []

    def receive(*signal_and_frame: Any) -> None:
        received.append(signal_and_frame)
        if len(received) > 1 and callable(handler):  # the step may hang
            handler(*signal_and_frame)

    try:
        try:
            if delays:
                signal.signal(signal.SIGINT, receive)
            yield
        finally:
            if delays:
                signal.signal(signal.SIGINT, handler)
            if len(received) == 1 and callable(handler):
                handler(*received[0])
    except BaseException:
        undo()
        raise
