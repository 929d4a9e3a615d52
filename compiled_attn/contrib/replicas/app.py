"""Routes of a fleet: its health and metrics, and all others, which replicas serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from compiled_attn.contrib.replicas.fleet import Fleet
from compiled_attn.contrib.replicas.frontend import Frontend

__all__ = ["fleet_app", "fleet_metrics", "merge_metrics"]


def fleet_app(fleet: Fleet, on_failure: Callable[[], None]) -> Starlette:
    """Create the application; ``on_failure`` is called if no replica can serve."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.ensure_future(fleet.watch(on_failure))
        try:
            yield
        finally:
            watching.cancel()

    async def health(request: Request) -> JSONResponse:
        each = [
            {"replica": one.number, "stage": one.stage, "process": one.process}
            for one in fleet.members
        ]
        content = {"status": fleet.stage, "replicas": each}
        return JSONResponse(content, 200 if fleet.ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(await fleet_metrics(fleet), media_type=CONTENT_TYPE_LATEST)

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Mount("/", _Gate(Frontend(fleet), fleet)),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


class _Gate:
    """Responds 503 while no replica is ready."""

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self._app, self._fleet = app, fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if not self._fleet.ready:
            message = f"expected a replica that is ready, got {self._fleet.stage}: try again"
            error = {"message": message, "type": "server_error", "param": None, "code": None}
            app = JSONResponse({"error": error}, 503, {"Retry-After": "1"})
        await app(scope, receive, send)


async def fleet_metrics(fleet: Fleet) -> bytes:
    """Return the metrics of the fleet and of each replica in Prometheus' text format."""
    texts = {str(number): text for number, text in await fleet.ask("metrics")}
    registry = CollectorRegistry()
    registry.register(_Metrics([*_own_metrics(fleet), *merge_metrics(texts)]))
    return generate_latest(registry)


def merge_metrics(texts: Mapping[str, str]) -> list[Metric]:
    """Merge metrics of replicas, given by label; each sample gets the label ``replica``."""
    merged: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            own = Metric(family.name, family.documentation, family.type)
            metric = merged.setdefault(family.name, own)
            for each in family.samples:
                metric.add_sample(each.name, {**each.labels, "replica": replica}, each.value)
    return [*merged.values()]


class _Metrics(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _own_metrics(fleet: Fleet) -> Iterable[Metric]:
    prefix = "compiled_attn_replicas"
    yield GaugeMetricFamily(prefix, "Number of replicas.", value=len(fleet.members))
    yield GaugeMetricFamily(f"{prefix}_ready", "Ready replicas.", value=len(fleet.ready))
    retries = "Requests sent to another replica because theirs exited."
    yield CounterMetricFamily(f"{prefix}_retried_requests", retries, value=fleet.retried)
    restarts = CounterMetricFamily(f"{prefix}_restarts", "New processes.", labels=["replica"])
    for each in fleet.members:
        restarts.add_metric([str(each.number)], each.restarts)
    yield restarts
