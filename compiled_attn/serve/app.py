"""The routes of the server: OpenAI's protocol, the model, health, metrics, version."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from compiled_attn import __version__
from compiled_attn.serve.adapters import add_adapter_routes
from compiled_attn.serve.chat import ChatEndpoint, CompletionEndpoint
from compiled_attn.serve.context import RequestContext, TrackRequests
from compiled_attn.serve.endpoint import Endpoint
from compiled_attn.serve.guard import with_cors, with_limits
from compiled_attn.serve.http_errors import RequestError, handle_errors
from compiled_attn.serve.metrics import Metrics
from compiled_attn.serve.model import ServedModel
from compiled_attn.serve.responses import ResponseEndpoint
from compiled_attn.serve.settings import ServerSettings
from graphs.errors import quoted

__all__ = ["create_app"]


def create_app(
    model: ServedModel, settings: ServerSettings | None = None, metrics: Metrics | None = None
) -> ASGIApp:
    """Returns the application that answers with a model; it stops the model when it ends.

    Args:
        model: loading or ready.
        settings: of HTTP; None: the defaults.
        metrics: of the requests; None: new ones.
    """
    own_settings, own_metrics = settings or ServerSettings(), metrics or Metrics(model)

    def on_end(context: RequestContext) -> None:
        own_metrics.count(context.status, context.results())
        if own_settings.access_log:
            print(_log_line(context), flush=True)

    routes = _routes(model, own_metrics)
    if own_settings.adapter_loading:
        add_adapter_routes(routes, model)
    app = with_limits(routes, own_settings)
    return with_cors(TrackRequests(app, model, on_end), own_settings)


def _routes(model: ServedModel, metrics: Metrics) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        model.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    handle_errors(app)

    endpoints: dict[str, Endpoint[Any]] = {
        "/v1/chat/completions": ChatEndpoint(model, metrics),
        "/v1/completions": CompletionEndpoint(model, metrics),
        "/v1/responses": ResponseEndpoint(model, metrics),
    }
    for path, endpoint in endpoints.items():
        app.add_route(path, endpoint.handle, methods=["POST"])  # FastAPI has nothing to parse

    def described(name: str) -> dict[str, Any]:
        parent = {} if name == model.name else {"parent": model.name}
        return {"id": name, "object": "model", "created": 0, "owned_by": "compiled-attn", **parent}

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [described(each) for each in model.names]})

    @app.get("/v1/models/{name:path}")
    async def describe_model(name: str) -> JSONResponse:
        if name not in model.names:
            raise RequestError(f"expected the model {model.name!r}, got {quoted(name)}", 404)
        return JSONResponse(described(name))

    @app.get("/health")
    async def health() -> JSONResponse:  # in the event loop: it waits for no thread
        return JSONResponse({"status": model.stage}, 200 if model.stage == "ready" else 503)

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return app


def _log_line(context: RequestContext) -> str:
    """One JSON line of the access log.

    ``ttft_s`` is the time to the first token of the first answer, ``seconds`` that to the end of
    the response.
    """
    results = context.results()
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": context.response_id or context.request_id,
        "request_id": context.request_id,
        "client": context.client,
        "method": context.method,
        "path": context.path,
        "status": context.status,
        "seconds": round(time.perf_counter() - context.started_s, 4),
    }
    if results:
        line |= {
            "prompt_tokens": sum(len(each.prompt) for each in results if not each.choice),
            "cached_tokens": sum(each.cached_tokens for each in results),
            "tokens": sum(len(each.tokens) for each in results),
            "ttft_s": round(min(each.ttft_s for each in results), 4),
        }
    return json.dumps(line)
