"""Errors of requests, as the OpenAI protocol tells them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from compiled_attn.errors import ConfigError, EngineStopped, QueueFull

__all__ = ["RequestError", "error_content", "tell_errors"]

_KINDS = {404: "not_found_error", 429: "rate_limit_error"}
_LATER = {"Retry-After": "1"}


class RequestError(Exception):
    """A request that is not served: a sentence for the client, and the status of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def tell_errors(app: FastAPI) -> None:
    """Answers every error with a status and one sentence; the server goes on."""

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        return _answer(error.status, str(error))

    @app.exception_handler(ConfigError)
    async def unservable(_: Request, error: ConfigError) -> JSONResponse:
        return _answer(400, str(error))

    @app.exception_handler(QueueFull)
    async def full(_: Request, error: QueueFull) -> JSONResponse:
        return _answer(429, str(error))

    @app.exception_handler(EngineStopped)
    async def stopped(_: Request, error: EngineStopped) -> JSONResponse:
        return _answer(503, str(error))

    @app.exception_handler(HTTPException)
    async def told(_: Request, error: HTTPException) -> JSONResponse:
        # What the handlers of transformers cannot process is the client's mistake.
        return _answer(400 if error.status_code == 422 else error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return _answer(500, f"{type(error).__name__}: {error}")


def _answer(status: int, message: str) -> JSONResponse:
    return JSONResponse(
        error_content(status, message), status, _LATER if status in (429, 503) else None
    )


def error_content(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The body of an answer with an error.

    Args:
        status: of HTTP.
        message: one sentence.
        code: that programs read, such as ``invalid_api_key``.
    """
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
