"""Errors of requests, in the JSON of the OpenAI protocol."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from compiled_attn.errors import ConfigError, EngineStopped, QueueFull

__all__ = ["RequestError", "error_content", "handle_errors"]

_TYPES = {404: "not_found_error", 429: "rate_limit_error"}
_STATUS: dict[type[Exception], int] = {ConfigError: 400, QueueFull: 429, EngineStopped: 503}


class RequestError(Exception):
    """A request that is refused: a sentence for the client, and the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def handle_errors(app: FastAPI) -> None:
    """Makes an application answer every exception with a status and one sentence."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestError):
            return _response(error.status, str(error))
        if isinstance(error, HTTPException):
            return _response(error.status_code, str(error.detail))
        for kind, status in _STATUS.items():
            if isinstance(error, kind):
                return _response(status, str(error))
        return _response(500, f"{type(error).__name__}: {error}")

    for kind in (RequestError, HTTPException, *_STATUS, Exception):
        app.add_exception_handler(kind, answer)


def _response(status: int, message: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(error_content(status, message), status, headers)


def error_content(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Builds the body of an error; ``code`` is for programs, such as ``invalid_api_key``."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
