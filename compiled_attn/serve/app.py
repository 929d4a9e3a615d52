"""The routes of the server: those of transformers' that one text model has, the model, health,
metrics.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from transformers.cli.serving.server import build_server

from compiled_attn.serve.call import Calls
from compiled_attn.serve.errors import RequestError, tell_errors
from compiled_attn.serve.handlers import Chats, Completions, OneModel, Responses
from compiled_attn.serve.metrics import exposition
from compiled_attn.serve.served import Served

__all__ = ["app_of"]

_ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"}


def app_of(served: Served) -> FastAPI:
    """The application that answers with a model; it ends with it.

    Args:
        served: the model, on its way or ready.
    """
    logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # a warning a request
    model: Any = OneModel(served)
    app = build_server(
        model,
        Chats(model, model),
        Completions(model, model),
        Responses(model, model),
        transcription_handler=None,  # type: ignore[arg-type]
        systemone_handler=None,  # type: ignore[arg-type]
        generation_state=model,
    )
    app.router.routes[:] = [
        route
        for route in app.router.routes
        if not isinstance(route, APIRoute) or route.path in _ROUTES
    ]
    app.add_middleware(Calls)
    tell_errors(app)

    @app.get("/v1/models/{name:path}")
    def the_model(name: str) -> JSONResponse:
        if name != served.name:
            raise RequestError(f"expected the model {served.name!r}, got {name!r}", 404)
        return JSONResponse(*model.list_models())

    @app.get("/health")
    def health() -> JSONResponse:
        return JSONResponse({"status": served.stage}, 200 if served.stage == "ready" else 503)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(exposition(served), media_type=CONTENT_TYPE_LATEST)

    return app
