"""What an engine measured, as one flat report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from graphs import Bucket, WarmupReport

__all__ = ["EngineReport", "Percentiles", "StepInfo", "StepRecord"]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median, 99th percentile and maximum of a list of milliseconds (0 where it is empty)."""

    p50: float
    p99: float
    max: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Percentiles:
        """The percentiles of a list of seconds, in milliseconds."""
        if not seconds:
            return Percentiles(0.0, 0.0, 0.0)
        p50, p99, most = np.percentile(np.asarray(seconds) * 1e3, [50, 99, 100]).tolist()
        return Percentiles(round(p50, 3), round(p99, 3), round(most, 3))


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The engine's state after a step, for progress displays."""

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    finished: int
    generated_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: what it needed, the bucket it ran in, and how long it took on the host's clock.

    ``blocks_used`` counts the blocks in use after it, ``highest_used`` is the highest place of one.
    ``wanted`` is what the scheduler's whole step needed, which is more where it was cut.
    """

    need: dict[str, int]
    bucket: dict[str, int]
    seconds: float
    blocks_used: int = 0
    highest_used: int = 0
    wanted: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Everything that ``compiled-attn run --json`` writes.

    ``graphs`` counts the graphs of steps, ``graphs_loaded`` those of them that came from a store;
    ``warmup_seconds`` includes the graphs that copy blocks.
    ``buckets`` has a row per bucket: its warmup, how many steps ran in it, how long they took.
    ``padding_waste`` is the padded share of computed tokens and of computed blocks.
    ``graph_breaks`` and ``compiles_after_warmup`` come from the sentinel, ``fallbacks`` counts
    every degraded bucket pick and a native kernel that failed to build, ``cut_steps`` the steps
    that no bucket held whole. ``kernel`` is "native", or which portable kernel serves the causal
    and shared parts; ``kernel_notes`` says why. ``memory`` has the copies of blocks: on write and
    to defragment.
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
    buckets: list[dict[str, object]] = field(default_factory=list)
    graphs_loaded: int = 0
    cut_steps: int = 0
    checked_requests: int = 0
    mismatched_tokens: int = 0

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-able values."""
        return asdict(self)


def bucket_rows(
    warmup: WarmupReport | None, records: Sequence[StepRecord], cost: Callable[[Bucket], float]
) -> list[dict[str, object]]:
    """A row per bucket of the warmup: status, warmup seconds, steps, padding, step times.

    ``waste`` is the padded share of what its steps cost; None where it had none.
    """
    ran: dict[tuple[int, ...], list[StepRecord]] = {}
    for record in records:
        ran.setdefault(tuple(record.bucket.values()), []).append(record)
    return [
        {
            "bucket": str(result.bucket),
            "status": result.status,
            "warmup_seconds": round(result.seconds, 3),
            "from_store": result.is_loaded,
            "steps": len(mine := ran.get(result.bucket.sizes, [])),
            "waste": _wasted(result.bucket, mine, cost),
            "step_ms": asdict(Percentiles.of([record.seconds for record in mine])),
            "error": result.error,
        }
        for result in (warmup.results if warmup else ())
    ]


def block_series(records: Sequence[StepRecord], total: int) -> list[dict[str, object]]:
    """Blocks in use and the highest place of one over the busy time, as `write_report` draws it."""
    elapsed = np.cumsum([record.seconds for record in records]).round(4).tolist()
    lines = {
        "in use": [record.blocks_used for record in records],
        "highest place": [record.highest_used for record in records],
    }
    chart: dict[str, object] = {"title": "Blocks of the cache", "x": elapsed, "lines": lines}
    return [chart | {"x_label": "seconds", "y_label": "blocks", "limit": total}]


def _wasted(
    bucket: Bucket, records: Sequence[StepRecord], cost: Callable[[Bucket], float]
) -> float | None:
    if not records:
        return None
    needed = sum(cost(Bucket(**{n: r.need[n] for n in bucket.names})) for r in records)
    return round(max(0.0, 1 - needed / (cost(bucket) * len(records))), 4)


def padding_waste(records: Sequence[StepRecord]) -> dict[str, float]:
    """Padded share of all tokens and of all blocks that the steps computed.

    The native kernel reads no padded blocks.
    """

    def share(*axes: str) -> float:
        needed = sum(record.need.get(axis, 0) for record in records for axis in axes)
        computed = sum(record.bucket.get(axis, 0) for record in records for axis in axes)
        return round(1 - needed / computed, 4) if computed else 0.0

    return {"tokens": share("tokens"), "blocks": share("shared", "unique")}
