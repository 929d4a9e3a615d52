"""The routes of a fleet: its health and figures, and all others, which replicas answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from compiled_attn.contrib.replicas.figures import fleet_exposition
from compiled_attn.contrib.replicas.fleet import Fleet
from compiled_attn.contrib.replicas.front import Front

__all__ = ["fleet_app"]


def fleet_app(fleet: Fleet, when_failed: Callable[[], None]) -> Starlette:
    """The application.

    Args:
        fleet: of replicas, ready or not.
        when_failed: called if none can serve, see `Fleet.error`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.ensure_future(fleet.watch(when_failed))
        try:
            yield
        finally:
            watching.cancel()

    async def health(request: Request) -> JSONResponse:
        each = [
            {"replica": one.number, "stage": one.stage, "process": one.process}
            for one in fleet.members
        ]
        told = {"status": fleet.stage, "replicas": each}
        return JSONResponse(told, 200 if fleet.ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(await fleet_exposition(fleet), media_type=CONTENT_TYPE_LATEST)

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Mount("/", _OnceReady(Front(fleet), fleet)),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


class _OnceReady:
    """Takes no request while no replica answers: 503, to be asked again."""

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self._app, self._fleet = app, fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if not self._fleet.ready:
            message = f"expected a replica that is ready, got {self._fleet.stage}: try again"
            error = {"message": message, "type": "server_error", "param": None, "code": None}
            app = JSONResponse({"error": error}, 503, {"Retry-After": "1"})
        await app(scope, receive, send)
