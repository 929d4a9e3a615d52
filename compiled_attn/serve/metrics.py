"""Figures of a server in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from compiled_attn.engine import Engine, EngineReport, GenerationResult, StepInfo
from compiled_attn.serve.served import Served

__all__ = ["Metrics"]

_PREFIX = "compiled_attn_"
_MODEL = "model_name"
# The boundaries of vLLM's histograms, so that its dashboards work.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Metrics:
    """Histograms and counters of requests under vLLM's names, and the figures of the engine.

    Args:
        served: the model.
    """

    def __init__(self, served: Served) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Figures(served))
        self._name = served.name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            whole = Histogram(
                f"vllm:{name}", text, [_MODEL], buckets=buckets, registry=self._registry
            )
            return whole.labels(served.name)

        self._first_token = histogram(
            "time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN
        )
        self._gap = histogram("inter_token_latency_seconds", "Time between two tokens.", _TOKEN)
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, of a request.",
            _TOKEN,
        )
        self._latency = histogram(
            "e2e_request_latency_seconds", "Time to the end of a request.", _REQUEST
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Time that a request waited to be begun.", _REQUEST
        )
        self._refused = Counter(
            f"{_PREFIX}refused_requests",
            "Requests that were answered with an error, by status of HTTP.",
            [_MODEL, "code"],
            registry=self._registry,
        )

    def count(self, status: int, results: Iterable[GenerationResult]) -> None:
        """Counts a request that has ended.

        Args:
            status: of its answer.
            results: what was generated for it.
        """
        if status >= 400:
            self._refused.labels(self._name, str(status)).inc()
        for result in results:
            self._first_token.observe(result.ttft_s)
            self._latency.observe(result.latency_s)
            self._queue.observe(result.queue_s)
            if (gaps := len(result.tokens) - 1) > 0:
                self._per_token.observe((result.latency_s - result.ttft_s) / gaps)

    def observe_gap(self, seconds: float) -> None:
        """Counts the time between two tokens of a stream."""
        self._gap.observe(seconds)

    def exposition(self) -> bytes:
        """What ``/metrics`` answers; figures of the engine only when it is warm."""
        return generate_latest(self._registry)


class _Figures(Collector):
    def __init__(self, served: Served) -> None:
        self._served = served

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not look at the engine."""
        return ()

    def collect(self) -> Iterable[Metric]:
        own = _Own(self._served.name)
        is_ready = self._served.stage == "ready"
        yield own.gauge("ready", "Whether the model is warm.", is_ready)
        if is_ready:
            look = self._served.engine.call
            yield from _now(own, look(lambda engine: engine.info(0)))
            yield from _so_far(own, look(Engine.report))


class _Own:
    """Metrics of this project, each with the name of the model."""

    def __init__(self, model: str) -> None:
        self._model = model

    def gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=[_MODEL])
        family.add_metric([self._model], float(value))
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=[_MODEL])
        family.add_metric([self._model], float(value))
        return family

    def counters(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=[_MODEL, label])
        for key, value in values.items():
            family.add_metric([self._model, key], float(value))
        return family


def _now(own: _Own, info: StepInfo) -> Iterable[Metric]:
    yield own.gauge("requests_running", "Requests that have blocks.", info.running)
    yield own.gauge("requests_waiting", "Requests that wait for blocks.", info.waiting)
    yield own.gauge("blocks_used", "Blocks of the cache that requests hold.", info.blocks_used)
    yield own.gauge("blocks", "Blocks of the cache.", info.blocks_total)


def _so_far(own: _Own, report: EngineReport) -> Iterable[Metric]:
    requests = {
        "served": report.requests - report.failed_requests,
        "failed": report.failed_requests,
    }
    tokens = {
        "prompt": report.prompt_tokens,
        "computed": report.computed_tokens,
        "generated": report.generated_tokens,
    }
    steps: dict[str, Any] = {str(row["bucket"]): row["steps"] for row in report.buckets}
    yield own.counters("requests", "Requests that finished.", "outcome", requests)
    yield own.counters("tokens", "Tokens by what was done with them.", "kind", tokens)
    yield own.counters("bucket_hits", "Steps that ran in each bucket.", "bucket", steps)
    yield own.counter("preemptions", "Requests that gave their blocks back.", report.preemptions)
    yield own.counter(
        "compiles_after_warmup",
        "What compiled while serving; more than 0 is a fault.",
        report.compiles_after_warmup,
    )
    yield own.gauge("prefix_hit_ratio", "Share of prompt tokens found.", report.prefix_hit_ratio)
    yield own.gauge("graphs", "Captured buckets.", report.graphs)
    yield own.gauge("graphs_loaded", "Of these, from the store.", report.graphs_loaded)
