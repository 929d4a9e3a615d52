"""Figures of an engine in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from compiled_attn.engine import Engine, EngineReport, StepInfo
from compiled_attn.serve.served import Served

__all__ = ["exposition"]

_PREFIX = "compiled_attn_"


def exposition(served: Served) -> bytes:
    """What ``/metrics`` answers; before the warmup has ended only whether it has."""
    registry = CollectorRegistry()
    registry.register(_Figures(served))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, served: Served) -> None:
        self._served = served

    def collect(self) -> Iterable[Metric]:
        is_ready = self._served.stage == "ready"
        yield _gauge("ready", "Whether the model is warm.", is_ready)
        if is_ready:
            look = self._served.engine.look
            yield from _now(look(lambda engine: engine.info(0)))
            yield from _so_far(look(Engine.report))


def _now(info: StepInfo) -> Iterable[Metric]:
    yield _gauge("requests_running", "Requests that have blocks.", info.running)
    yield _gauge("requests_waiting", "Requests that wait for blocks.", info.waiting)
    yield _gauge("blocks_used", "Blocks of the cache that requests hold.", info.blocks_used)
    yield _gauge("blocks", "Blocks of the cache.", info.blocks_total)


def _so_far(report: EngineReport) -> Iterable[Metric]:
    requests = {
        "served": report.requests - report.failed_requests,
        "failed": report.failed_requests,
    }
    tokens = {
        "prompt": report.prompt_tokens,
        "computed": report.computed_tokens,
        "generated": report.generated_tokens,
    }
    steps = {str(row["bucket"]): row["steps"] for row in report.buckets}
    yield _counter("requests", "Requests that finished.", "outcome", requests)
    yield _counter("tokens", "Tokens by what was done with them.", "kind", tokens)
    yield _counter("bucket_hits", "Steps that ran in each bucket.", "bucket", steps)
    yield _counter("preemptions", "Requests that gave their blocks back.", None, report.preemptions)
    yield _counter(
        "compiles_after_warmup",
        "What compiled while serving; more than 0 is a fault.",
        None,
        report.compiles_after_warmup,
    )
    yield _gauge("prefix_hit_ratio", "Share of prompt tokens found.", report.prefix_hit_ratio)
    yield _gauge("graphs", "Captured buckets.", report.graphs)
    yield _gauge("graphs_loaded", "Of these, from the store.", report.graphs_loaded)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, label: str | None, values: object) -> Metric:
    if label is None:
        return CounterMetricFamily(_PREFIX + name, text, value=float(str(values)))
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    assert isinstance(values, dict)
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family
