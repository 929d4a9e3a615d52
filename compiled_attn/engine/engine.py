"""Continuous batching over captured graphs: capture once, serve, never compile again.

What is true of an engine are its open requests, their tokens, and the events that their readers
have not got. All else (blocks, queue, prefix cache) follows from these. So a step is computed, then
its `Outcome` exists, which is the moment that it was done, and then the outcome is made true. An
exception or Ctrl-C anywhere between leaves an attempt behind: an outcome that exists is made true,
one that does not is forgotten, and the open requests wait for fresh blocks, to be computed again.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from transformers import PreTrainedModel

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.block_memory import BlockMemory
from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.constraint import Constraint, Grammars, without_grammars
from compiled_attn.engine.executor import Executor
from compiled_attn.engine.local import executor_for
from compiled_attn.engine.report import EngineReport, StepInfo, info_of, report_of
from compiled_attn.engine.request_state import (
    GenerationResult,
    HasStop,
    Mailbox,
    RequestState,
    TokenEvent,
)
from compiled_attn.engine.sampling import (
    SamplingParams,
    check_fits,
    check_lengths,
    check_settings,
    token_ids,
)
from compiled_attn.engine.scheduler import Scheduler
from compiled_attn.engine.sizing import Sizing, StepSize
from compiled_attn.engine.steps import Attempt, Changes, Outcome, StepsUnderWay
from compiled_attn.engine.stream import Known, Stream, Workload, ended, results_of
from compiled_attn.engine.tally import Tally
from graphs import WarmupReport, no_compile

__all__ = ["Engine"]


class Engine:
    """Serves many requests, step by step, from captured graphs.

    After an exception, Ctrl-C included, every call works: the step that was interrupted was done,
    or is done again. What was running is then computed again, and the prefix cache is empty.

    Args:
        model: a Hugging Face causal LM in eval mode, whose attention a `LocalExecutor` switches to
            the paged cache; or any executor, which is what computes the steps.
        config: sizes and policies; None: those of the executor, or the defaults.
        has_stop: finds stop strings, as `compiled_attn.text.Tokenizer.has_stop`; None: they are
            refused.
        grammars: compiles grammars, as `compiled_attn.text.Grammars`; None: they are refused.

    Attributes:
        sentinel: what compiled since the warmup.
        warmup_report: of the last warmup, None before it.
        restarts: how often an exception interrupted a step or an abort.
        prompt_tokens: tokens of all prompts that were submitted.

    Raises:
        ConfigError, graphs.CaptureError, ValueError: see `LocalExecutor`; or the executor was made
            with another configuration.
        RuntimeError: another engine has the executor.
        TypeError: it is neither a model nor an executor.

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
        step = self.sizing.step or StepSize.of(config, self.sizing.form.symbolic)
        self.scheduler = Scheduler(self.pool, step.tokens, config.max_seqs)
        self.tally = Tally([*self.sizing.buckets], self.sizing.buckets.cost)
        self.sentinel = no_compile(strict=config.strict, all_threads=config.watch_process)
        self._steps = StepsUnderWay(executor, self.memory, self.scheduler, self.sentinel)
        self.warmup_report: WarmupReport | None = None
        self._has_stop, self._grammars = has_stop, grammars
        self._requests: dict[int, RequestState] = {}
        self._unwanted: set[int] = set()
        self._ids = itertools.count()
        self._mailbox: Mailbox[TokenEvent] = Mailbox()
        self._streams: Known = []
        self._changes = Changes(self._recover)
        self.restarts = 0
        self.prompt_tokens = 0
        executor.attach()  # last: what failed before leaves it to another engine

    @property
    def sizing(self) -> Sizing:
        """Context, blocks and buckets; after the warmup the buckets that were captured."""
        return self.executor.sizing

    @property
    def pool(self) -> BlockPool:
        """Who holds which block; another one after an exception ended a step."""
        return self.memory.pool

    def warmup(self, progress: Callable[..., None] | None = None) -> WarmupReport:
        """Captures every bucket and the block copies; from here on the sentinel watches each step.

        Args:
            progress: called with an event per bucket, see `graphs.progress_for`.

        Raises:
            graphs.CaptureError: no bucket could be captured, or not all of them (strict).
        """
        report = self.executor.warmup(progress)
        self._refuse_unservable()
        self.warmup_report = report
        return report

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        salt: Salt = None,
        arrived_s: float | None = None,
    ) -> int:
        """Queues a request and returns its id; `step` returns its tokens.

        Args:
            prompt: token ids, at least one: integers of Python or numpy, a tensor ``[n]``.
            sampling: how it is continued.
            salt: only requests of equal salt share cached prefixes, such as those of one tenant.
            arrived_s: when it arrived, on the clock of `time.perf_counter`; None: now.

        Raises:
            ConfigError: the request can never be served: too long for the context, the pool or
                every bucket, empty, not integers, or with a token outside the vocabulary; or its
                grammar cannot be compiled.
        """
        sampling = SamplingParams() if sampling is None else sampling
        return self._enter(token_ids(prompt), sampling, salt, arrived_s, self._mailbox, None)

    def step(self) -> list[TokenEvent]:
        """Computes one step and returns the tokens of requests that `submit` queued.

        Tokens of a `stream` that is open go to that stream. Events that an interrupted call could
        not return come with the next one. Empty if there is no work.

        Raises:
            RuntimeError: the engine is not warmed up.
            compiled_attn.models.hf.ModelChanged: the model is not as it was then.
            graphs.GraphBudgetExceeded: something compiled (strict).
        """
        self._mailbox.arrived()
        self._advance()
        try:
            return self._mailbox.hand_out()
        except BaseException:
            self._mailbox.came_back()
            raise

    def abort(self, request_id: int) -> None:
        """Drops a request that has not finished; its blocks are free at once.

        Called while a step runs (by a signal handler, say), it takes effect before the next one.
        Events that the request has by then are still told.

        Raises:
            KeyError: no such request is waiting or running.
        """
        if request_id not in self._requests:
            raise KeyError(
                f"expected a waiting or running request, got {request_id}: it may have finished"
            )
        self._abort({request_id})

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
        """Results as they finish, see `stream`; ``result.index`` is the position of the prompt.

        Args:
            prompts, sampling, salt, arrivals, concurrency, on_step: see `stream`.
            in_order: results in the order of the prompts, and of the ``n`` continuations of each,
                each as soon as those before it are there.
        """
        stream = self.stream(
            prompts,
            sampling,
            salt=salt,
            arrivals=arrivals,
            concurrency=concurrency,
            on_step=on_step,
        )
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
        """Tokens as they are generated. A consumer that stops early aborts what is open.

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
        workload = Workload.of(prompts, sampling, salt, arrivals, concurrency)
        for each in zip(workload.prompts, workload.sampling, workload.salts, strict=True):
            self._check(*each, None)
        stream = Stream(self, workload, on_step)
        self._streams = [*self._streams, (weakref.ref(stream), stream.mailbox)]
        return stream

    def end_tokens(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end such a request, and are no part of its text."""
        stop = frozenset(sampling.stop_token_ids)
        return stop if sampling.ignore_eos else stop | self.executor.eos

    def info(self, elapsed_s: float) -> StepInfo:
        """The engine's state now, ``elapsed_s`` seconds after the start of serving."""
        return info_of(self, elapsed_s)

    @property
    def open_requests(self) -> set[int]:
        """Ids of the requests that wait or run."""
        return set(self._requests)

    @property
    def steps_ahead(self) -> int:
        """Steps that began before the tokens of the one before were there."""
        return self._steps.ahead

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to return."""
        return bool(self._requests) or len(self._mailbox) > 0

    def report(self) -> EngineReport:
        """What happened since the engine was made."""
        return report_of(self)

    def _check(
        self, prompt: list[int], sampling: SamplingParams, salt: Salt, arrived_s: float | None
    ) -> None:
        check_settings(sampling, salt, arrived_s, has_text=self._has_stop is not None)
        check_fits(self.sizing, prompt, sampling)
        self._constraint(sampling, len(prompt))  # compiles it

    def _constraint(self, sampling: SamplingParams, prompt_len: int) -> Constraint | None:
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise without_grammars(sampling.grammar)
        ends = self.end_tokens(sampling)
        return Constraint(self._grammars, sampling.grammar, prompt_len, ends, self.sizing.vocab)

    def _enter(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: Salt,
        arrived_s: float | None,
        mailbox: Mailbox[TokenEvent],
        index: int | None,
        choice: int = 0,
    ) -> int:
        """`submit`, whose events go to a mailbox, under an index (None: its id) and a choice."""
        self._check(prompt, sampling, salt, arrived_s)
        request_id = next(self._ids)
        sequence = RequestState(
            request_id,
            prompt,
            len(prompt),
            sampling.seeded(),
            time.perf_counter() if arrived_s is None else float(arrived_s),
            stop_tokens=self.end_tokens(sampling),
            salt=salt,
            index=request_id if index is None else index,
            mailbox=mailbox,
            has_stop=self._has_stop,
            constraint=self._constraint(sampling, len(prompt)),
            choice=choice,
        )
        try:
            self._requests[request_id] = sequence
            self.scheduler.add(sequence)
            self.prompt_tokens += len(prompt)
            return request_id
        except BaseException:
            self._requests.pop(request_id, None)
            self.scheduler.discard(sequence)
            raise

    def _advance(self) -> None:
        """Computes one step for everybody; events go to the mailboxes of their requests."""
        if self.warmup_report is None:
            raise RuntimeError(
                "expected a warmed-up engine: call engine.warmup() before the first step"
            )
        self._changes.refuse_second()
        self.executor.check_unchanged()
        self._finish_attempt()
        self._abort_unwanted()
        if self.scheduler.has_work:
            self._changes.run(self._compute)

    def _finish_attempt(self) -> None:
        """After an interrupted change: what was done stays done, the rest begins again."""
        self._changes.finish(is_whole=self.scheduler.knows(len(self._requests)))

    def _recover(self, outcome: Outcome | None) -> None:
        self.sentinel.disarm()
        self._steps.forget()
        if outcome is not None:
            outcome.make_true(self._requests, self.tally)
        self.memory.reset()
        self.scheduler.restart(self.pool, self._requests.values())
        self.restarts += 1

    def _compute(self, attempt: Attempt) -> None:
        attempt.outcome = outcome = self._steps.outcome(self.tally.count("steps"))
        outcome.make_true(self._requests, self.tally)
        outcome.release(self.scheduler, self.memory)

    def _abort(self, request_ids: set[int]) -> None:
        """Drops those of the requests that are open, at once or before the next step."""
        self._unwanted |= request_ids & self._requests.keys()
        if not self._changes.is_running:
            self._finish_attempt()
            self._abort_unwanted()

    def _abort_unwanted(self) -> None:
        """Drops what `abort` named, and the requests of streams that have ended."""
        if not self._unwanted and not self._streams:
            return
        unwanted, gone = set(self._unwanted), ended(self._streams)
        for request_id, sequence in list(self._requests.items()) if unwanted or gone else ():
            is_unwanted = request_id in unwanted or any(sequence.mailbox is box for box in gone)
            if is_unwanted and request_id in self._requests:  # a finaliser may drop it meanwhile
                self._changes.run(partial(self._drop, sequence))
        self._unwanted -= unwanted
        self._streams = [each for each in self._streams if all(each[1] is not b for b in gone)]

    def _drop(self, sequence: RequestState, _: Attempt) -> None:
        del self._requests[sequence.request_id]
        self.scheduler.finish(sequence)

    def _refuse_unservable(self) -> None:
        """Ends requests that were queued before a warmup which lost the buckets for them."""
        for sequence in list(self._requests.values()):
            try:
                check_lengths(self.sizing, sequence.prompt_len, sequence.sampling.max_new_tokens)
            except ConfigError as error:
                event = sequence.failure(str(error), time.perf_counter())
                sequence.mailbox.put({("warmup", sequence.request_id): event})
                self._changes.run(partial(self._drop, sequence))
                self.tally.count_failure()
