"""The report of an engine, gathered from its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_attn.engine.metrics import EngineReport, StepInfo, bucket_rows

if TYPE_CHECKING:
    from compiled_attn.engine.engine import Engine

__all__ = ["info_of", "report_of"]


def info_of(engine: Engine, elapsed_s: float) -> StepInfo:
    """The engine's state now, ``elapsed_s`` seconds after the start of serving."""
    total = engine.sizing.num_blocks - 1
    return StepInfo(
        running=len(engine.scheduler.running),
        waiting=len(engine.scheduler.waiting),
        blocks_used=total - engine.pool.available,
        blocks_total=total,
        finished=engine.tally.count("requests"),
        generated_tokens=engine.tally.count("generated_tokens"),
        elapsed_s=elapsed_s,
        step=engine.tally.last,
    )


def report_of(engine: Engine) -> EngineReport:
    """What happened since the engine was made."""
    executor, sentinel = engine.executor.report(), engine.sentinel
    stats, steps, warm = engine.memory.stats(), executor.steps, engine.warmup_report
    tally, busy = engine.tally, engine.tally["seconds"]
    generated = tally.count("generated_tokens")
    return EngineReport(
        graphs=len(steps.captured) if steps else 0,
        graphs_loaded=len(steps.loaded) if steps else 0,
        graph_breaks=sentinel.graph_breaks,
        compiles_after_warmup=sentinel.compiles + sentinel.late_builds,
        fallbacks=executor.fallbacks,
        warmup_seconds=round(warm.elapsed_seconds, 3) if warm else 0.0,
        requests=tally.count("requests"),
        failed_requests=tally.count("failed_requests"),
        nonfinite_rows=tally.count("nonfinite_rows"),
        restarts=engine.restarts,
        generated_tokens=generated,
        tokens_per_second=round(generated / busy, 2) if busy else 0.0,
        ttft_ms=tally.ttft_ms,
        step_ms=tally.step_ms,
        padding_waste=tally.padding_waste(),
        preemptions=engine.scheduler.preemptions,
        blocks_high_water=stats.high_water,
        torch=torch.__version__,
        backend=executor.backend,
        kernel=executor.kernel,
        kernel_notes=dict(executor.notes),
        steps=tally.count("steps"),
        prompt_tokens=engine.prompt_tokens,
        computed_tokens=tally.count("need tokens"),
        prefix_hit_ratio=round(stats.hit_ratio, 4),
        memory=engine.memory.figures(),
        cut_steps=tally.count("cut_steps"),
        seconds=round(busy, 3),
        buckets=bucket_rows(steps, tally),
    )
