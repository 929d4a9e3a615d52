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

__all__ = ["with_cors", "with_limits"]

_BODY_SECONDS = 120.0
"""Time for a client to send its body. Without a limit slow ones hold up a graceful stop."""
_LINGER_SECONDS = 2.0
"""Time to discard the rest of a refused body. Closing at once would reset the connection, and the
client would lose the answer."""


def with_limits(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Wraps an application with the API key, where there is one, and the body limit."""
    return _Limits(app, settings)


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


class _Limits:
    """Checks the API key, and receives the whole body before the application runs.

    ``/health`` stays open for load balancers. Chunked bodies count as they arrive: it holds at most
    `max_body` bytes and one network read.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._max_body, key = app, settings.max_body, settings.api_key
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if self._expected is not None and scope["path"] != "/health":
            given = headers.get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if not hmac.compare_digest(scheme.title() + b" " + key.strip(), self._expected):
                message = (
                    "expected the API key of this server as 'Authorization: Bearer KEY', got "
                    f"{'another one' if given else 'none'}: pass api_key to the client"
                )
                content = error_content(401, message, code="invalid_api_key")
                answer = JSONResponse(content, 401, {"WWW-Authenticate": "Bearer"})
                return await answer(scope, receive, send)
        declared = headers.get(b"content-length", b"0")
        body: bytes | None = None
        if not (declared.isdigit() and int(declared[:20]) > self._max_body):
            try:
                async with asyncio.timeout(_BODY_SECONDS):
                    body = await self._body(receive)
            except TimeoutError:
                limit = f"within {_BODY_SECONDS:.0f} s, got a part: send it faster"
                return await _refuse(408, f"expected the whole body {limit}", receive, send)
            except ConnectionError:
                return
        if body is None:
            message = (
                f"expected a body of at most {self._max_body:,} bytes, got a larger one: shorten "
                "it, or raise --max-body of the server"
            )
            return await _refuse(413, message, receive, send)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body; None as soon as it is too large. Raises ConnectionError if the client goes."""
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if len(body) > self._max_body:
                return None
            if not message.get("more_body"):
                return bytes(body)
        raise ConnectionError


async def _refuse(status: int, message: str, receive: Receive, send: Send) -> None:
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
