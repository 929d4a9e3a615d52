"""Continuous batching over captured graphs: capture once, serve, never compile again.

Durable state: open requests, their tokens, undelivered events. Everything else (blocks, queue,
prefix cache) can be rebuilt from them, so a step is a transaction: an exception before its result
is committed rolls it back, and the open requests wait for fresh blocks, to be computed again.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.adapters import NamedAdapters, ServedAdapter
from compiled_attn.engine.block_memory import BlockMemory
from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.constraint import Constraint, Grammars, without_grammars
from compiled_attn.engine.executor import Executor
from compiled_attn.engine.local import executor_for
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.report import EngineReport, StepInfo
from compiled_attn.engine.request_state import GenerationResult, HasStop, RequestState, TokenEvent
from compiled_attn.engine.sampling import (
    SamplingParams,
    check_fits,
    check_lengths,
    check_settings,
    token_ids,
)
from compiled_attn.engine.scheduler import Scheduler
from compiled_attn.engine.sizing import Sizing, StepSize
from compiled_attn.engine.speculation.drafter import Drafter
from compiled_attn.engine.speculation.sources import drafter_of
from compiled_attn.engine.steps import StepResult, StepRunner, Transactions, delayed_interrupt
from compiled_attn.engine.stream import Stream, planned_requests, results_of
from compiled_attn.engine.tally import Tally
from graphs import WarmupReport, no_compile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Engine"]


class Engine:
    """Serves many requests, step by step, from captured graphs.

    After an exception in a step every call works: the running requests are computed again, and the
    prefix cache is empty. Ctrl-C takes effect at the end of the running step.

    Args:
        model: a Hugging Face causal LM in eval mode, whose attention a `LocalExecutor` switches to
            the paged cache; or an executor, which computes the steps.
        config: sizes and policies; None: those of the executor, or the defaults.
        has_stop: finds stop strings, as `compiled_attn.text.Tokenizer.has_stop`; None: they are
            refused.
        grammars: compiles grammars, as `compiled_attn.text.Grammars`; None: they are refused.

    Attributes:
        executor: computes the steps.
        adapters: adds and removes LoRA adapters.
        sentinel: counts compiles since the warmup.
        warmup_report: report of the last warmup; None before it.
        restarts: how often a step or an abort was rolled back.
        prompt_tokens: tokens of all submitted prompts.
        is_streaming: whether a stream is open.

    Raises:
        ConfigError, graphs.CaptureError, ValueError: see `LocalExecutor`; or the executor was made
            with another configuration.
        RuntimeError: another engine uses the executor.
        TypeError: ``model`` is neither a model nor an executor.

    Example::

        engine = Engine(model, EngineConfig(max_seqs=8))
        engine.warmup()
        for result in engine.generate(prompts, SamplingParams(max_new_tokens=32)):
            print(result.index, result.tokens)
    """

    def __init__(
        self,
        model: Executor | PreTrainedModel,
        config: EngineConfig | None = None,
        *,
        has_stop: HasStop | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.executor = executor = executor_for(model, config)
        self.config = config = executor.config
        self.memory = BlockMemory(self.executor, config)
        step = self.sizing.step or StepSize.of(config, self.sizing.layout.symbolic)
        self._drafter = self._new_drafter()
        self.scheduler = Scheduler(self.pool, step.tokens, config.max_seqs, self._drafter)
        self.tally = Tally.of(self.sizing, config.longest_draft)
        self.sentinel = no_compile(strict=config.strict, all_threads=config.watch_process)
        self._steps = StepRunner(executor, self.memory, self.scheduler, self.sentinel)
        self.warmup_report: WarmupReport | None = None
        self.grammars, self._has_stop = grammars, has_stop
        self._requests, self._dropped = dict[int, RequestState](), set[int]()
        self.adapters = NamedAdapters(getattr(executor, "adapters", None), self._requests)
        self._events, self._ids = deque[TokenEvent](), itertools.count()
        self._transactions = Transactions(self._rollback)
        self._result: StepResult | None = None  # while it is committed
        self.is_streaming = False
        self.restarts = self.prompt_tokens = 0
        executor.attach()  # last: after an error above another engine can use it

    @property
    def sizing(self) -> Sizing:
        """Context, blocks and buckets; after the warmup the buckets that were captured."""
        return self.executor.sizing

    @property
    def pool(self) -> BlockPool:
        """Allocates blocks; replaced by another pool when a step is rolled back."""
        return self.memory.pool

    def warmup(self, progress: Callable[..., None] | None = None) -> WarmupReport:
        """Captures every bucket and the block copies; the sentinel watches each later step.

        Args:
            progress: called with an event per bucket, see `graphs.progress_for`.

        Raises:
            graphs.CaptureError: no bucket could be captured, or not all of them (strict).
        """
        report = self.executor.warmup(progress)
        self._refuse_unservable()
        if self._drafter is not None:
            self._drafter.begin(self.sizing.buckets, self.executor.report().steps, progress)
        self.warmup_report = report
        return report

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        salt: Salt = None,
        arrived_s: float | None = None,
        adapter: ServedAdapter | None = None,
    ) -> int:
        """Queues a request and returns its id; `step` returns its tokens.

        Args:
            prompt: token ids, at least one: integers of Python or numpy, a tensor ``[n]``.
            sampling: how it is continued.
            salt: only requests of equal salt share cached prefixes, such as those of one tenant.
            arrived_s: when it arrived, on the clock of `time.perf_counter`; None: now.
            adapter: of `adapters.of`, before it was removed; None: what ``sampling`` names now.

        Raises:
            ConfigError: the request can never be served: too long for the context, the pool or
                every bucket, empty, not integers, or with a token outside the vocabulary; or its
                grammar cannot be compiled.
        """
        sampling = SamplingParams() if sampling is None else sampling
        given = salt, arrived_s, self._events, None, adapter
        return self.enter(token_ids(prompt), sampling, *given)

    def step(self) -> list[TokenEvent]:
        """Computes one step and returns the tokens of requests that `submit` queued.

        Tokens of an open `stream` go to that stream. Empty if there is no work.

        Raises:
            RuntimeError: the engine is not warmed up, or a step is running.
            compiled_attn.models.hf.ModelChanged: the model has changed since the warmup.
            graphs.GraphBudgetExceeded: something compiled (strict).
            KeyboardInterrupt: at the end of the step; the next call returns its tokens.
        """
        self.advance()
        return self.take_events()

    def take_events(self) -> list[TokenEvent]:
        """Removes and returns undelivered events, e.g. after `step` raised an exception."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def abort(self, request_id: int) -> None:
        """Drops a request that has not finished; its blocks are free at once.

        Called while a step runs (by a signal handler, say), it takes effect before the next one.
        Events that the request has by then are still returned.

        Raises:
            KeyError: no such request is waiting or running.
        """
        if request_id not in self._requests:
            raise KeyError(
                f"expected a waiting or running request, got {request_id}: it may have finished"
            )
        self.drop({request_id})

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: Salt | Sequence[Salt] = None,
        arrivals: Sequence[float] | None = None,
        concurrency: int | None = None,
        in_order: bool = False,
        on_step: Callable[[StepInfo], None] | None = None,
    ) -> Iterator[GenerationResult]:
        """Yields results as they finish, see `stream`; ``result.index`` is that of the prompt.

        Args:
            prompts, sampling, salt, arrivals, concurrency, on_step: see `stream`.
            in_order: results in the order of the prompts, and of the ``n`` continuations of each.
        """
        stream = self.stream(
            prompts, sampling, salt=salt, arrivals=arrivals, concurrency=concurrency,
            on_step=on_step,
        )  # fmt: skip
        return results_of(stream, in_order=in_order)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: Salt | Sequence[Salt] = None,
        arrivals: Sequence[float] | None = None,
        concurrency: int | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
    ) -> Stream:
        """Yields tokens as they are generated. A consumer that stops early aborts open requests.

        Requests are checked now, and served while the result is iterated over.

        Args:
            prompts: token ids of each request.
            sampling: one for all, or one each.
            salt: one for all, or one each, see `submit`.
            arrivals: seconds from the first `next` on at which each request arrives (open loop);
                None: at once.
            concurrency: requests in flight at most (closed loop); None: no limit.
            on_step: called after every step.

        Raises:
            ConfigError: a request that can never be served; then none is.
        """
        requests, limit = planned_requests(prompts, sampling, salt, arrivals, concurrency)
        for each in requests:
            self.check(each.prompt, each.sampling, each.salt)
        return Stream(self, requests, limit, on_step)

    def end_tokens(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end such a request, and are not part of its text."""
        stop = frozenset(sampling.stop_token_ids)
        return stop if sampling.ignore_eos else stop | self.executor.eos

    def info(self, elapsed_s: float) -> StepInfo:
        """Returns the current state, ``elapsed_s`` seconds after the start of serving."""
        return StepInfo.of(self.scheduler, self.tally, self.sizing.num_blocks - 1, elapsed_s)

    @property
    def open_requests(self) -> set[int]:
        """Ids of the requests that wait or run."""
        return set(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to return."""
        return bool(self._requests or self._events)

    def report(self) -> EngineReport:
        """Reports what happened since the engine was made."""
        return EngineReport.of(
            *(self.executor, self.memory, self.tally, self.sentinel, self.warmup_report),
            prompt_tokens=self.prompt_tokens, preemptions=self.scheduler.preemptions,
            restarts=self.restarts, steps_ahead=self._steps.ahead, adapters=self.adapters.figures(),
        )  # fmt: skip

    def check(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: Salt = None,
        arrived_s: float | None = None,
        adapter: ServedAdapter | None = None,
    ) -> ServedAdapter:
        """Returns the adapter of a request; raises ConfigError if it can never be served."""
        check_settings(sampling, salt, arrived_s, has_text=self._has_stop is not None)
        check_fits(self.sizing, prompt, sampling)
        adapter = adapter or self.adapters.of(sampling.adapter)
        self._constraint(sampling, len(prompt))
        return adapter

    def _constraint(self, sampling: SamplingParams, prompt_len: int) -> Constraint | None:
        grammar, grammars = sampling.grammar, self.grammars
        if grammar is None:
            return None
        if grammars is None:
            raise without_grammars(grammar)
        return Constraint(
            grammars, grammar, prompt_len, self.end_tokens(sampling), self.sizing.vocab
        )

    def enter(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: Salt,
        arrived_s: float | None,
        events: deque[TokenEvent],
        name: tuple[int, int] | None,
        adapter: ServedAdapter | None = None,
    ) -> int:
        """Queues a request, as `submit`, whose events go to a queue.

        ``name`` is the index and the choice of its events; None: its id and 0.
        """
        adapter = self.check(prompt, sampling, salt, arrived_s, adapter)
        request_id = next(self._ids)
        index, choice = (request_id, 0) if name is None else name
        sequence = RequestState(
            request_id, prompt, len(prompt), sampling.seeded(),
            time.perf_counter() if arrived_s is None else float(arrived_s),
            stop_tokens=self.end_tokens(sampling), salt=adapter.salt(salt), index=index,
            events=events, has_stop=self._has_stop, choice=choice, adapter=adapter.slot,
            constraint=self._constraint(sampling, len(prompt)),
        )  # fmt: skip
        with delayed_interrupt(undo=lambda: self.drop({request_id})):  # its id was not returned
            self._requests[request_id] = sequence
            self.scheduler.add(sequence)
            self.prompt_tokens += len(prompt)
        return request_id

    def advance(self) -> None:
        """Computes one step for all requests; their events wait in their queues."""
        if self.warmup_report is None:
            raise RuntimeError(
                "expected a warmed-up engine: call engine.warmup() before the first step"
            )
        self.executor.check_unchanged()
        if not self._transactions.run(self._run):
            raise RuntimeError(
                "expected an idle engine, got a call from within a step, or from another thread: "
                "let one thread step it"
            )

    def drop(self, request_ids: set[int]) -> None:
        """Aborts those of the requests that are open, at once or before the next step."""
        self._dropped |= request_ids & self._requests.keys()
        if self._dropped:
            self._transactions.run(self._drop_all)

    def has_started(self, request_id: int) -> bool:
        """Whether the prompt of a request was computed, or it has finished."""
        return (found := self._requests.get(request_id)) is None or found.generated > 0

    def _run(self) -> None:
        self._drop_all()
        if self.scheduler.has_work:
            self._run_step()

    def _run_step(self) -> None:
        self._result = result = self._steps.compute()
        result.commit(self._requests, self.tally, self.scheduler)
        self._result = None

    def _rollback(self) -> None:
        if self._result is not None:
            self._result.complete(self._requests)
            self._result = None
        self._steps.rollback()
        self.memory.reset()
        self.scheduler.restart(self.pool, self._requests.values())
        self.restarts += 1

    def _drop_all(self) -> None:
        while self._dropped:
            if sequence := self._requests.get(self._dropped.pop()):
                self._drop(sequence)

    def _drop(self, sequence: RequestState) -> None:
        del self._requests[sequence.request_id]
        self.scheduler.finish(sequence)

    def _new_drafter(self) -> Drafter | None:
        return drafter_of(self.executor, self.config)

    def _refuse_unservable(self) -> None:
        """Fails requests that were queued before a warmup which lost the buckets for them."""
        for sequence in list(self._requests.values()):
            try:
                check_lengths(self.sizing, sequence.prompt_len, sequence.sampling.max_new_tokens)
            except ConfigError as error:
                row = RowResult(error=str(error))
                sequence.events.append(sequence.event(row, 0, time.perf_counter(), reason="error"))
                self.drop({sequence.request_id})
                self.tally.count_failure()
