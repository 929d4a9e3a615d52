"""Continuous batching over captured graphs: capture once, serve, never compile again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.kernel import chosen_kernel
from compiled_attn.engine.memory import BlockMemory
from compiled_attn.engine.metrics import (
    EngineReport,
    Percentiles,
    StepInfo,
    StepRecord,
    bucket_rows,
    padding_waste,
)
from compiled_attn.engine.runner import Runner
from compiled_attn.engine.sampling import SamplingParams, sample
from compiled_attn.engine.scheduler import Scheduler
from compiled_attn.engine.sequence import GenerationResult, Sequence, TokenEvent
from compiled_attn.engine.sizing import Sizing
from compiled_attn.engine.workload import Workload, serve
from graphs import BucketSpace, CaptureError, WarmupReport, no_compile

__all__ = ["Engine"]


class Engine:
    """Serves many requests with one model, step by step, from captured graphs.

    Args:
        model: a Hugging Face causal LM in eval mode; its attention is switched to the paged cache.
        config: sizes and policies.

    Raises:
        ConfigError: the sizes do not fit each other or the model.
        ValueError: the model cannot run on the paged cache, see `compiled_attn.hf.PagedCausalLM`.

    Example::

        engine = Engine(model, EngineConfig(max_seqs=8))
        engine.warmup()
        for result in engine.generate(prompts, SamplingParams(max_new_tokens=32)):
            print(result.index, result.tokens)
        print(engine.report().to_dict())
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig | None = None) -> None:
        self.config = config = config or EngineConfig()
        self.model = model
        self.kernel = chosen_kernel(model, config)
        self.sizing = Sizing.of(model, config, self.kernel.is_native)
        self.runner = Runner(model, config, self.sizing)
        self.memory = BlockMemory(self.runner.module.cache, config)
        self.pool = self.memory.pool
        self.scheduler = Scheduler(self.pool, config.max_tokens_per_step, config.max_seqs)
        self.records: list[StepRecord] = []
        self.results: list[GenerationResult] = []
        self._sentinel = no_compile(strict=config.strict, all_threads=config.watch_process)
        self._warm: WarmupReport | None = None
        self._is_serving = False
        self._next_index = 0
        self._generated = 0
        self._prompt_tokens = 0
        self._eos = _eos_tokens(model)

    def warmup(self, progress: Callable[..., None] | None = None) -> WarmupReport:
        """Captures every bucket and the block copies; from here on the sentinel watches each step.

        Args:
            progress: called with an event per bucket, see `graphs.progress_for`.

        Raises:
            graphs.CaptureError: no bucket could be captured, or not all of them (strict).
        """
        report = self.runner.graphs.warmup(progress)
        captured = [result.bucket for result in report.captured]
        missing = [result for result in report.results if result.status != "captured"]
        if not captured or (missing and self.config.strict):
            raise CaptureError(
                f"step[{missing[0].bucket}]",
                f"{missing[0].error}; {len(missing)} of {len(report.results)} buckets are not "
                "captured: mend the cause, or serve from the others with strict=False",
            )
        buckets = self.sizing.buckets
        serving = BucketSpace(buckets.names, captured, buckets.cost)
        self.sizing = replace(self.sizing, buckets=serving)
        copies = self.memory.warmup(progress)
        self._warm = WarmupReport(
            (*report.results, *copies.results), report.elapsed_seconds + copies.elapsed_seconds
        )
        return self._warm

    def submit(
        self,
        prompt: SequenceOf[int],
        sampling: SamplingParams | None = None,
        *,
        arrived_s: float | None = None,
    ) -> int:
        """Queues a request and returns its index.

        Args:
            prompt: token ids, at least one.
            sampling: how it is continued.
            arrived_s: when it arrived, on the clock of `time.perf_counter`; None: now.

        Raises:
            ConfigError: the request can never be served: too long for the context, the pool or
                every bucket, empty, or with a token outside the vocabulary.
        """
        sampling = sampling or SamplingParams()
        prompt = [int(token) for token in prompt]
        self.sizing.check(prompt, sampling)
        stop = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else self._eos
        )
        arrived = time.perf_counter() if arrived_s is None else arrived_s
        sequence = Sequence(
            self._next_index, prompt, len(prompt), sampling, arrived, stop_tokens=stop
        )
        self.scheduler.add(sequence)
        self._next_index += 1
        self._prompt_tokens += len(prompt)
        return sequence.index

    def step(self) -> list[TokenEvent]:
        """Computes one step and returns the tokens it generated; empty if there is no work.

        Raises:
            RuntimeError: the engine is not warmed up.
            graphs.GraphBudgetExceeded: something compiled (strict).
        """
        if self._warm is None:
            raise RuntimeError(
                "expected a warmed-up engine: call engine.warmup() before the first step"
            )
        if not self.scheduler.has_work:
            return []
        started = time.perf_counter()
        scheduled = self.scheduler.schedule()
        with self._sentinel:
            self.memory.settle()
            step, plan, bucket, wanted = self.runner.fit(scheduled, self.memory.table)
            logits = self.runner.run(plan, bucket)
        sampled = [part.sequence for part in step if part.wants_logits]
        tokens = sample(logits, [s.sampling for s in sampled], [s.generated for s in sampled])
        self.scheduler.commit(step)
        now = time.perf_counter()
        events = [self._take(s, token, now) for s, token in zip(sampled, tokens, strict=True)]
        self.records.append(
            StepRecord(
                plan.need,
                dict(bucket),
                time.perf_counter() - started,
                self.pool.places.num_used,
                self.pool.highest_used,
                wanted,
            )
        )
        return events

    def abort(self, index: int) -> None:
        """Drops a request that has not finished; its blocks are free at once.

        Raises:
            KeyError: no such request is waiting or running.
        """
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            if sequence.index == index:
                self.scheduler.finish(sequence)
                return
        raise KeyError(
            f"expected a waiting or running request, got index {index}: it may have finished"
        )

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        sampling: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        arrivals: SequenceOf[float] | None = None,
        concurrency: int | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
    ) -> Iterator[GenerationResult]:
        """Results as they finish, see `stream`; ``result.index`` counts over the engine's life."""
        return _results(
            self.stream(
                prompts, sampling, arrivals=arrivals, concurrency=concurrency, on_step=on_step
            )
        )

    def stream(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        sampling: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        arrivals: SequenceOf[float] | None = None,
        concurrency: int | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
    ) -> Iterator[TokenEvent]:
        """Tokens as they are generated. A consumer that stops early aborts what is open.

        Requests are checked now, and served while the result is iterated over.

        Args:
            prompts: token ids of each request.
            sampling: one for all, or one each.
            arrivals: seconds from now at which each request arrives (open loop); None: at once.
            concurrency: requests in flight at most (closed loop); None: no limit.
            on_step: called after every step.

        Raises:
            ConfigError: a request that can never be served; then none is.
        """
        workload = Workload.of(prompts, sampling, arrivals, concurrency)
        for prompt, params in zip(workload.prompts, workload.sampling, strict=True):
            self.sizing.check(prompt, params)
        return serve(self, workload, on_step)

    def info(self, elapsed_s: float) -> StepInfo:
        """The engine's state now, ``elapsed_s`` seconds after the start of serving."""
        total = self.sizing.num_blocks - 1
        return StepInfo(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks_used=total - self.pool.available,
            blocks_total=total,
            finished=len(self.results),
            generated_tokens=self._generated,
            elapsed_s=elapsed_s,
        )

    @property
    def open_requests(self) -> set[int]:
        """Indices of the requests that wait or run."""
        return {s.index for s in (*self.scheduler.running, *self.scheduler.waiting)}

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Marks the engine as serving a workload; one at a time.

        Raises:
            RuntimeError: it is serving one already.
        """
        if self._is_serving:
            raise RuntimeError(
                "expected an idle engine, but it serves another stream: finish or close that first"
            )
        self._is_serving = True
        try:
            yield
        finally:
            self._is_serving = False

    def report(self) -> EngineReport:
        """What happened since the engine was made."""
        stats, steps, warm = self.pool.stats(), self.runner.graphs.report, self._warm
        busy = sum(record.seconds for record in self.records)
        return EngineReport(
            graphs=len(steps.captured) if steps else 0,
            graphs_loaded=len(steps.loaded) if steps else 0,
            graph_breaks=self._sentinel.graph_breaks,
            compiles_after_warmup=self._sentinel.compiles + self._sentinel.late_builds,
            fallbacks=self._fallbacks(),
            warmup_seconds=round(warm.elapsed_seconds, 3) if warm else 0.0,
            requests=len(self.results),
            generated_tokens=self._generated,
            tokens_per_second=round(self._generated / busy, 2) if busy else 0.0,
            ttft_ms=Percentiles.of([result.ttft_s for result in self.results]),
            step_ms=Percentiles.of([record.seconds for record in self.records]),
            padding_waste=padding_waste(self.records),
            preemptions=self.scheduler.preemptions,
            blocks_high_water=stats.high_water,
            torch=torch.__version__,
            backend=self.config.backend_name,
            kernel="native" if self.kernel.is_native else self.runner.module.kernel().name,
            kernel_notes=dict(self.kernel.notes),
            steps=len(self.records),
            prompt_tokens=self._prompt_tokens,
            computed_tokens=sum(record.need["tokens"] for record in self.records),
            prefix_hit_ratio=round(stats.hit_ratio, 4),
            memory=self.memory.figures(),
            cut_steps=self.runner.cut_steps,
            seconds=round(busy, 3),
            buckets=bucket_rows(steps, self.records, self.sizing.buckets.cost),
        )

    def _fallbacks(self) -> int:
        graphs = self.runner.graphs
        return graphs.fallbacks + graphs.degraded + self.kernel.is_fallback

    def _take(self, sequence: Sequence, token: int, now: float) -> TokenEvent:
        sequence.append(token, now)
        self._generated += 1
        if sequence.finish_reason is None:
            return TokenEvent(sequence.index, token)
        self.scheduler.finish(sequence)
        self.results.append(sequence.result(now))
        return TokenEvent(sequence.index, token, self.results[-1])


def _results(events: Iterator[TokenEvent]) -> Iterator[GenerationResult]:
    with contextlib.closing(events) as stream:  # type: ignore[type-var]
        for event in stream:
            if event.result is not None:
                yield event.result


def _eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
