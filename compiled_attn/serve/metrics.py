"""Metrics of a server in the format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from compiled_attn.engine import GenerationResult
from compiled_attn.serve.model import ServedModel

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
    """Histograms and counters of requests under vLLM's names, and values of the engine."""

    def __init__(self, model: ServedModel) -> None:
        self._registry, self._name = CollectorRegistry(), model.name
        self._registry.register(_EngineCollector(model))
        self._gaps = _GapCollector(model.name)
        self._registry.register(self._gaps)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            own = Histogram(
                f"vllm:{name}", text, [_MODEL], buckets=buckets, registry=self._registry
            )
            return own.labels(model.name)

        self._first_token = histogram(
            "time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, of a request.",
            _TOKEN,
        )
        self._latency = histogram(
            "e2e_request_latency_seconds", "Time to the end of a request.", _REQUEST
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Time that a request waited in the queue.", _REQUEST
        )
        self._refused = Counter(
            f"{_PREFIX}refused_requests",
            "Requests that were answered with an error, by status of HTTP.",
            [_MODEL, "code"],
            registry=self._registry,
        )

    def count(self, status: int, results: Iterable[GenerationResult]) -> None:
        """Counts a finished request by the status of its response, and its generations."""
        if status >= 400:
            self._refused.labels(self._name, str(status)).inc()
        for result in results:
            self._first_token.observe(result.ttft_s)
            self._latency.observe(result.latency_s)
            self._queue.observe(result.queue_s)
            if (gaps := len(result.tokens) - 1) > 0:
                self._per_token.observe((result.latency_s - result.ttft_s) / gaps)

    def observe_gaps(self, seconds: float, count: int) -> None:
        """Counts times between tokens of a stream; for the thread of the event loop."""
        self._gaps.observe(seconds, count)

    def exposition(self) -> bytes:
        """Returns the body of ``/metrics``; values of the engine only once it is warm."""
        return generate_latest(self._registry)


class _QuietCollector(Collector):
    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask the engine."""
        return ()


class _GapCollector(_QuietCollector):
    """A histogram for one writing thread: it needs no locks, which every token would pay for."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts, self._sum = [0] * (len(_TOKEN) + 1), 0.0

    def observe(self, seconds: float, count: int) -> None:
        self._counts[bisect_left(_TOKEN, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterable[Metric]:
        name, text = "vllm:inter_token_latency_seconds", "Time between two tokens."
        family = HistogramMetricFamily(name, text, labels=[_MODEL])
        bounds = [*map(floatToGoString, _TOKEN), "+Inf"]
        cumulative = accumulate(self._counts)
        family.add_metric([self._model], [*zip(bounds, cumulative, strict=True)], self._sum)
        yield family


class _EngineCollector(_QuietCollector):
    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def collect(self) -> Iterable[Metric]:
        is_ready = self._model.stage == "ready"
        yield self._family(GaugeMetricFamily, "ready", "Whether the model is warm.", {"": is_ready})
        if not is_ready:
            return
        info, report = self._model.engine.call(lambda engine: (engine.info(0), engine.report()))
        gauges = {
            "requests_running": ("Requests that have blocks.", info.running),
            "requests_waiting": ("Requests that wait for blocks.", info.waiting),
            "blocks_used": ("Blocks of the cache that requests hold.", info.blocks_used),
            "blocks": ("Blocks of the cache.", info.blocks_total),
            "prefix_hit_ratio": ("Share of prompt tokens found.", report.prefix_hit_ratio),
            "graphs": ("Captured buckets.", report.graphs),
            "graphs_loaded": ("Of these, from the store.", report.graphs_loaded),
        }
        if report.adapters:
            gauges["adapter_slots"] = "Slots for adapters.", report.adapters["slots"]
        for name, (text, value) in gauges.items():
            yield self._family(GaugeMetricFamily, name, text, {"": value})
        text, by_name = "Open requests of each adapter.", report.adapters.get("requests", {})
        yield self._family(GaugeMetricFamily, "adapter_requests", text, by_name, "adapter")
        failed = report.failed_requests
        tokens = {
            "prompt": report.prompt_tokens,
            "computed": report.computed_tokens,
            "generated": report.generated_tokens,
        }
        hits: dict[str, Any] = {str(row["bucket"]): row["steps"] for row in report.buckets}
        served = {"served": report.requests - failed, "failed": failed}
        compiles = {"": report.compiles_after_warmup}
        drafted, accepted = (
            {str(place): count for place, count in enumerate(report.drafts.get(kind, ()), start=1)}
            for kind in ("drafted", "accepted")
        )
        counters: list[tuple[str, str, Mapping[str, float], str]] = [
            ("requests", "Requests that finished.", served, "outcome"),
            ("tokens", "Tokens by what was done with them.", tokens, "kind"),
            ("bucket_hits", "Steps that ran in each bucket.", hits, "bucket"),
            ("preemptions", "Requests that were preempted.", {"": report.preemptions}, ""),
            ("drafted_tokens", "Tokens of drafts by place.", drafted, "position"),
            ("accepted_tokens", "Of these, accepted ones.", accepted, "position"),
            ("compiles_after_warmup", "Compiles while serving, which are faults.", compiles, ""),
        ]
        for counter in counters:
            yield self._family(CounterMetricFamily, *counter)

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        label: str = "",
    ) -> Metric:
        """A metric with a value of each label; without a label of one value."""
        labels = [_MODEL, label] if label else [_MODEL]
        family = kind(_PREFIX + name, text, labels=labels)
        for key, value in values.items():
            family.add_metric([self._model.name, key][: len(labels)], float(value))
        return family
