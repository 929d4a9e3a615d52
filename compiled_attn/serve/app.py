"""The routes of the server: OpenAI's protocol, the model, health, metrics, version."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from compiled_attn import __version__
from compiled_attn.serve.access_log import access_line
from compiled_attn.serve.call import Call, Calls, current_call
from compiled_attn.serve.errors import RequestError, tell_errors
from compiled_attn.serve.guard import with_cors, with_limits
from compiled_attn.serve.handler import OneModel
from compiled_attn.serve.handlers import Chats, Completions, Responses
from compiled_attn.serve.metrics import Metrics
from compiled_attn.serve.served import Served
from compiled_attn.serve.settings import ServerSettings

__all__ = ["app_of"]

_ASKING = "/v1/"


def app_of(served: Served, settings: ServerSettings | None = None) -> ASGIApp:
    """The application that answers with a model; it ends with it.

    Args:
        served: the model, on its way or ready.
        settings: of HTTP; None: the default ones.
    """
    settings = settings or ServerSettings()
    logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # a warning a request
    metrics = served.metrics = Metrics(served)
    calls = Calls(
        with_limits(_routes(served, metrics), settings), partial(_count, metrics, settings)
    )
    return with_cors(_Open(calls, served), settings)


def _count(metrics: Metrics, settings: ServerSettings, call: Call) -> None:
    metrics.count(call.status, call.results())
    if settings.access_log:
        print(access_line(call), flush=True)


class _Open:
    """Counts the requests that a stop waits for."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app, self._served = app, served

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_asking = scope["type"] == "http" and scope["path"].startswith(_ASKING)
        self._served.open_requests += is_asking
        try:
            await self._app(scope, receive, send)
        finally:
            self._served.open_requests -= is_asking


def _routes(served: Served, metrics: Metrics) -> FastAPI:
    model: Any = OneModel(served)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        served.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    tell_errors(app)

    def add(path: str, prefix: str, handler: Any) -> None:
        @app.post(path)
        async def answer(request: Request) -> Response:
            served.refuse_while_draining()
            call = current_call()
            # Transformers puts "resp_" before the id of a response itself.
            call.response_id = prefix + call.key
            raw, own = await request.body(), call.key if prefix == "resp_" else call.response_id
            response: Response = await handler.handle_raw(raw, own)
            return response

    add("/v1/chat/completions", "chatcmpl-", Chats(model, model))
    add("/v1/completions", "cmpl-", Completions(model, model))
    add("/v1/responses", "resp_", Responses(model, model))

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": model.get_gen_models()})

    @app.get("/v1/models/{name:path}")
    async def the_model(name: str) -> JSONResponse:
        if name != served.name:
            raise RequestError(f"expected the model {served.name!r}, got {name!r}", 404)
        return JSONResponse(*model.list_models())

    @app.get("/health")
    async def health() -> JSONResponse:  # in the event loop: it waits for no thread
        return JSONResponse({"status": served.stage}, 200 if served.stage == "ready" else 503)

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    def figures() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return app
