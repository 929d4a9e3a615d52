"""An HTTP request while it is handled: its ids, its client, and its generations."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compiled_attn.engine import GenerationResult, RequestHandle
from compiled_attn.serve.http_errors import RequestError
from compiled_attn.serve.model import ServedModel

__all__ = ["SALT_HEADER", "RequestContext", "TrackRequests"]

Result = TypeVar("Result")

SALT_HEADER = "X-Cache-Salt"
"""Names a tenant: only requests of equal salt share cached blocks."""

_ID_HEADER = "X-Request-Id"
_ID_PATTERN = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_CLIENT_GONE = 499  # as nginx logs it


@dataclass
class RequestContext:
    """One HTTP request."""

    salt: str | None  # see SALT_HEADER
    receive: Receive  # reports when the client has gone
    method: str = ""
    path: str = ""
    client: str = ""  # address
    request_id: str = ""  # from the header X-Request-Id, or a new one
    key: str = field(default_factory=lambda: uuid4().hex)  # digits of the ids in the response
    response_id: str = ""  # such as chatcmpl-...; empty where nothing is generated
    status: int = _CLIENT_GONE
    started_s: float = field(default_factory=time.perf_counter)
    held: list[Any] = field(default_factory=list)  # as long as the request, such as a grammar
    handles: list[RequestHandle] = field(default_factory=list)  # cancelled when it ends
    has_ended: bool = False

    async def unless_gone(self, work: Awaitable[Result]) -> Result:
        """Awaits work; cancels it and raises RequestError when the client goes away."""
        done, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._wait_gone())
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise RequestError("expected a client that waits, got one that left", _CLIENT_GONE)
            return done.result()
        finally:
            gone.cancel()
            done.cancel()

    def results(self) -> list[GenerationResult]:
        """Results of the generations that finished, without cancelled and failed ones."""
        found = []
        for handle in self.handles:
            if handle.has_finished:
                with contextlib.suppress(Exception):  # the response reported it
                    found.append(handle.result(0))
        return found

    async def cancel_when_gone(self) -> None:
        """Cancels the generations when the client goes away."""
        await self._wait_gone()
        self.cancel()

    def add(self, handles: Sequence[RequestHandle]) -> None:
        """Adds generations; from any thread."""
        self.handles += handles
        if self.has_ended:
            self.cancel()

    def cancel(self) -> None:
        """Cancels all generations, also those that are added later."""
        self.has_ended = True
        for handle in self.handles:
            handle.cancel()

    async def _wait_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


class TrackRequests:
    """Middleware that makes a `RequestContext` for each request, and cancels its generations.

    ``model`` counts the requests that a stop waits for. ``on_end`` is called with each one when its
    response was sent or its client has gone.
    """

    def __init__(
        self, app: ASGIApp, model: ServedModel, on_end: Callable[[RequestContext], None]
    ) -> None:
        self._app, self._model, self._on_end = app, model, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        context = _make_context(scope, receive)
        scope["compiled_attn"] = context
        is_counted = context.path.startswith("/v1/")
        self._model.open_requests += is_counted

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                own = (_ID_HEADER.lower().encode(), context.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            context.status = 500
            raise
        finally:
            context.cancel()
            self._model.open_requests -= is_counted
            self._on_end(context)


def _make_context(scope: Scope, receive: Receive) -> RequestContext:
    headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
    client = (scope.get("client") or ("",))[0]
    method, path = scope.get("method", ""), scope.get("path", "")
    salt = headers.get(SALT_HEADER.lower().encode())
    context = RequestContext(salt, receive, method, path, client)
    given = headers.get(_ID_HEADER.lower().encode(), "")
    context.request_id = given if _ID_PATTERN.fullmatch(given) else context.key
    return context
