"""ASGI middleware that refuses a request before its body is parsed: API key, body size, origin."""

from __future__ import annotations

import asyncio
import contextlib
import hmac

from fastapi.responses import JSONResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compiled_attn.serve.http_errors import error_content
from compiled_attn.serve.settings import ServerSettings

__all__ = ["ApiKey", "BodyLimit", "with_cors", "with_limits"]

_BODY_SECONDS = 120.0
"""Time for a client to send its body. Without a limit slow ones hold up a graceful stop."""
_LINGER_SECONDS = 2.0
"""Time to discard the rest of a refused body. Closing at once would reset the connection, and the
client would lose the answer."""


def with_limits(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Wraps an application with the API key, where there is one, and the body limit."""
    limited: ASGIApp = BodyLimit(app, settings.max_body)
    return limited if settings.api_key is None else ApiKey(limited, settings.api_key)


def with_cors(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Wraps an application with CORS headers, where origins are allowed."""
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )


class ApiKey:
    """Answers 401 to requests without the key; ``/health`` stays open for load balancers."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        if hmac.compare_digest(scheme.title() + b" " + key.strip(), self._expected):
            return await self._app(scope, receive, send)
        message = (
            "expected the API key of this server as 'Authorization: Bearer KEY', got "
            f"{'another one' if given else 'none'}: pass api_key to the client"
        )
        content = error_content(401, message, code="invalid_api_key")
        answer = JSONResponse(content, 401, {"WWW-Authenticate": "Bearer"})
        await answer(scope, receive, send)


class BodyLimit:
    """Receives the whole body before the application runs; answers 413 if it is too large.

    Chunked bodies count as they arrive. Holds at most `max_body` bytes and one network read.
    """

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app = app
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self._max_body:
            return await self._refuse_large(scope, receive, send)
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body, is_whole = await self._body(receive)
        except TimeoutError:
            message = (
                f"expected the whole body within {_BODY_SECONDS:.0f} s, got a part: send it faster"
            )
            return await _refuse(408, message, scope, receive, send)
        except ConnectionError:
            return
        if not is_whole:
            return await self._refuse_large(scope, receive, send)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)

    async def _body(self, receive: Receive) -> tuple[bytes, bool]:
        """The body, and whether it is whole: False as soon as it is too large.

        Raises:
            ConnectionError: the client has gone.
        """
        parts, size = [], 0
        while (message := await receive())["type"] == "http.request":
            parts.append(part := message.get("body", b""))
            size += len(part)
            if size > self._max_body:
                return b"", False
            if not message.get("more_body"):
                return b"".join(parts), True
        raise ConnectionError

    async def _refuse_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = (
            f"expected a body of at most {self._max_body:,} bytes, got a larger one: shorten it, "
            "or raise --max-body of the server"
        )
        await _refuse(413, message, scope, receive, send)


async def _refuse(status: int, message: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers, then discards what the client still sends for a moment, and closes."""
    answer = JSONResponse(error_content(status, message), status, {"Connection": "close"})
    start = {"status": status, "headers": answer.raw_headers}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
