"""An HTTP request while it is handled: its ids, its client, and what it asked of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compiled_attn.engine import GenerationResult, RequestHandle
from compiled_attn.serve.errors import RequestError

__all__ = ["HEADER", "Call", "Calls", "current_call"]

Result = TypeVar("Result")

HEADER = "X-Cache-Salt"
"""The header that names a tenant, or whoever else must not learn what others asked."""

_REQUEST_ID = "X-Request-Id"
_PLAIN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_GONE = 499  # as nginx says it; nobody reads it
_FAILED = 500

_call: ContextVar[Call] = ContextVar("call")


@dataclass
class Call:
    """One request of a client.

    Args:
        salt: from its header: only requests of equal salt share cached blocks.
        receive: tells when the client has gone.
        method, path, client: of the request; the client is its address.
        request_id: from its header ``X-Request-Id``, or a new one.

    Attributes:
        key: hexadecimal digits that the ids of the answer are made of.
        response_id: of the answer, such as ``chatcmpl-...``; empty where nothing is generated.
        status: of the answer; 499 where the client went away before it began.
        started_s: when it came, on the clock of `time.perf_counter`.
        held: kept in memory until it ends, such as a compiled grammar.
    """

    salt: str | None
    receive: Receive
    method: str = ""
    path: str = ""
    client: str = ""
    request_id: str = ""
    key: str = field(default_factory=lambda: uuid4().hex)
    response_id: str = ""
    status: int = _GONE
    started_s: float = field(default_factory=time.perf_counter)
    held: list[Any] = field(default_factory=list)
    _handles: list[RequestHandle] = field(default_factory=list)

    def owns(self, handle: RequestHandle) -> RequestHandle:
        """Ends with the call, whatever ends that."""
        self._handles.append(handle)
        return handle

    async def unless_gone(self, work: Awaitable[Result]) -> Result:
        """The result of what is waited for, which is cancelled when the client goes away.

        Raises:
            RequestError: it did.
        """
        ended, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise RequestError("expected a client that waits, got one that has gone", _GONE)
            return ended.result()
        finally:
            gone.cancel()
            ended.cancel()

    def results(self) -> list[GenerationResult]:
        """The answers that have ended, without those that were cancelled or failed."""
        found = []
        for handle in self._handles:
            if handle.has_finished:
                with contextlib.suppress(Exception):  # its own error, which the client was told
                    found.append(handle.result(0))
        return found

    def end(self) -> None:
        """Drops what is still generated: nobody reads it."""
        for handle in self._handles:
            handle.cancel()

    async def _gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


def current_call() -> Call:
    """The request that is handled now."""
    return _call.get()


class Calls:
    """Middleware that makes a `Call` of each HTTP request, and ends it with it.

    Args:
        app: to handle it.
        on_end: called with each call when its answer was sent, or its client has gone.
    """

    def __init__(self, app: ASGIApp, on_end: Callable[[Call], None]) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        call = _call_of(scope, receive)
        token = _call.set(call)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                own = (_REQUEST_ID.lower().encode(), call.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            call.status = _FAILED
            raise
        finally:
            _call.reset(token)
            call.end()
            self._on_end(call)


def _call_of(scope: Scope, receive: Receive) -> Call:
    headers = dict(scope.get("headers", ()))
    salt = headers.get(HEADER.lower().encode())
    given = headers.get(_REQUEST_ID.lower().encode(), b"").decode("latin-1")
    call = Call(
        None if salt is None else salt.decode("latin-1"),
        receive,
        scope.get("method", ""),
        scope.get("path", ""),
        (scope.get("client") or ("",))[0],
    )
    call.request_id = given if _PLAIN_ID.fullmatch(given) else call.key
    return call
