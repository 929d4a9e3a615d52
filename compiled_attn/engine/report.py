"""The report of an engine, collected from its parts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from compiled_attn.engine.block_memory import BlockMemory
from compiled_attn.engine.executor import Executor
from compiled_attn.engine.scheduler import Scheduler
from compiled_attn.engine.tally import Percentiles, Series, StepRecord, Tally
from graphs import WarmupReport, no_compile
from graphs.torch_internals.catalog import features_of_process

__all__ = ["EngineReport", "StepInfo", "block_series"]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The engine's state after a step, for progress displays; ``step`` is that step."""

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    finished: int
    generated_tokens: int
    elapsed_s: float
    step: StepRecord | None = None

    @staticmethod
    def of(scheduler: Scheduler, tally: Tally, blocks: int, elapsed_s: float) -> StepInfo:
        """Collects the state of an engine with so many blocks."""
        return StepInfo(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_used=blocks - scheduler.pool.available,
            blocks_total=blocks,
            finished=tally.count("requests"),
            generated_tokens=tally.count("generated_tokens"),
            elapsed_s=elapsed_s,
            step=tally.last,
        )


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Everything that ``compiled-attn run --json`` writes.

    ``graphs`` counts the captured buckets of steps, ``compiled_graphs`` what was compiled for them,
    as buckets share a graph whose sizes are symbols, and ``graphs_loaded`` the buckets whose graph
    came from a store; ``warmup_seconds`` includes the graphs that copy blocks.
    ``buckets`` has a row per bucket: its warmup, how many steps ran in it, how long they took.
    ``padding_waste`` is the padded share of computed tokens and of computed blocks.
    ``graph_breaks``, ``compiles_after_warmup`` and ``replays`` (of recorded graphs: steps and
    copies of blocks) come from the sentinel, ``fallbacks`` counts every degraded bucket pick and a
    native kernel that failed to build, ``cut_steps`` the steps that did not fit a bucket as a
    whole, ``steps_ahead`` those that async scheduling launched ahead. ``kernel`` is "native", or
    the portable kernel of the causal and shared parts; ``kernel_notes`` says why, which variants
    are fastest here, and on CUDA which calls other kernels than Triton's serve.
    ``memory`` has the copies of blocks: on write and to defragment, ``kv_cache`` the size of the
    cache and the reason for it (`CacheSize`), ``step_size`` the most tokens of a step and the
    reason (`StepSize`).
    ``ranks`` counts the processes that computed each step together.
    ``requests`` counts those that finished, ``failed_requests`` those of them that
    finished with an error, ``nonfinite_rows`` the rows of logits that were NaN or infinite, and
    ``restarts`` how often an exception ended a step, after which all running requests were computed
    again. ``torch_features`` has "on", or why it is off, for each optional use of torch's internals
    (`graphs.torch_features`). With ``speculate``, ``drafts`` counts the drafted and the accepted
    tokens at each position of a draft. ``states`` has the slots for recurrent states (`StateSize`)
    and their bytes, how many snapshots are stored, and how many were saved, restored and evicted.
    With ``max_adapters``, ``adapters`` has the slots, their rank and bytes, and the open requests
    of each adapter.
    """

    graphs: int
    graph_breaks: int
    compiles_after_warmup: int
    fallbacks: int
    warmup_seconds: float
    requests: int
    generated_tokens: int
    tokens_per_second: float
    ttft_ms: Percentiles
    step_ms: Percentiles
    padding_waste: dict[str, float]
    preemptions: int
    blocks_high_water: int
    torch: str
    backend: str
    kernel: str
    kernel_notes: dict[str, str]
    steps: int
    prompt_tokens: int
    computed_tokens: int
    prefix_hit_ratio: float
    seconds: float
    memory: dict[str, float] = field(default_factory=dict)
    kv_cache: dict[str, object] = field(default_factory=dict)
    step_size: dict[str, object] = field(default_factory=dict)
    buckets: list[dict[str, object]] = field(default_factory=list)
    graphs_loaded: int = 0
    compiled_graphs: int = 0
    cut_steps: int = 0
    steps_ahead: int = 0
    replays: int = 0
    failed_requests: int = 0
    nonfinite_rows: int = 0
    restarts: int = 0
    checked_requests: int = 0
    mismatched_tokens: int = 0
    torch_features: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    drafts: dict[str, list[int]] = field(default_factory=dict)
    states: dict[str, object] = field(default_factory=dict)
    adapters: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Returns the report as JSON-able values."""
        return asdict(self)

    @staticmethod
    def of(
        executor: Executor,
        memory: BlockMemory,
        tally: Tally,
        sentinel: no_compile,
        warmup: WarmupReport | None,
        *,
        prompt_tokens: int,
        preemptions: int,
        restarts: int,
        steps_ahead: int,
        adapters: dict[str, Any],
    ) -> EngineReport:
        """Collects the report from the parts of an engine, see its attributes."""
        made, sizing, stats = executor.report(), executor.sizing, memory.stats()
        steps, busy = made.steps, tally["seconds"]
        generated = tally.count("generated_tokens")
        return EngineReport(
            graphs=len(steps.captured) if steps else 0,
            graphs_loaded=len(steps.loaded) if steps else 0,
            compiled_graphs=steps.graphs if steps else 0,
            graph_breaks=sentinel.graph_breaks,
            compiles_after_warmup=sentinel.compiles + sentinel.late_builds,
            fallbacks=made.fallbacks,
            warmup_seconds=round(warmup.elapsed_seconds, 3) if warmup else 0.0,
            requests=tally.count("requests"),
            failed_requests=tally.count("failed_requests"),
            nonfinite_rows=tally.count("nonfinite_rows"),
            restarts=restarts,
            generated_tokens=generated,
            tokens_per_second=round(generated / busy, 2) if busy else 0.0,
            ttft_ms=tally.ttft_ms,
            step_ms=tally.step_ms,
            padding_waste=tally.padding_waste(),
            preemptions=preemptions,
            blocks_high_water=stats.high_water,
            torch=torch.__version__,
            torch_features={each.name: each.why_off or "on" for each in features_of_process()},
            backend=made.backend,
            kernel=made.kernel,
            kernel_notes=dict(made.notes),
            ranks=made.ranks,
            steps=tally.count("steps"),
            prompt_tokens=prompt_tokens,
            computed_tokens=tally.count("need tokens"),
            prefix_hit_ratio=round(stats.hit_ratio, 4),
            memory=memory.figures(),
            kv_cache=asdict(sizing.cache) if sizing.cache else {},
            step_size=asdict(sizing.step) if sizing.step else {},
            cut_steps=tally.count("cut_steps"),
            steps_ahead=steps_ahead,
            replays=sentinel.replays,
            seconds=round(busy, 3),
            drafts=tally.drafts() if tally.longest_draft else {},
            states=memory.states(),
            adapters=adapters,
            buckets=_bucket_rows(steps, tally),
        )


def block_series(blocks: Series, total: int) -> list[dict[str, object]]:
    """Returns the chart of blocks in use and of the highest one, for `write_report`."""
    elapsed, used, highest = blocks.columns() or ((), (), ())
    chart: dict[str, object] = {
        "title": "Blocks of the cache",
        "x": [round(seconds, 4) for seconds in elapsed],
        "lines": {"in use": list(used), "highest": list(highest)},
    }
    return [chart | {"x_label": "seconds", "y_label": "blocks", "limit": total}]


def _bucket_rows(warmup: WarmupReport | None, tally: Tally) -> list[dict[str, object]]:
    """A row per bucket of the warmup; ``waste`` is the padded share of the cost of its steps."""
    rows: list[dict[str, object]] = []
    for result in warmup.results if warmup else ():
        steps, waste, times = tally.of_bucket(result.bucket)
        rows.append(
            {
                "bucket": str(result.bucket),
                "status": result.status,
                "warmup_seconds": round(result.seconds, 3),
                "from_store": result.is_loaded,
                "graph": result.graph,
                "why_alone": result.why_alone,
                "steps": steps,
                "waste": waste,
                "step_ms": asdict(times),
                "error": result.error,
            }
        )
    return rows
