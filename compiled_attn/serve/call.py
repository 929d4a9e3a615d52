"""An HTTP request while it is handled: its salt, and what it asked of the engine."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from compiled_attn.engine import GenerationResult, RequestHandle
from compiled_attn.serve.errors import RequestError

__all__ = ["HEADER", "Call", "Calls", "current_call"]

HEADER = "X-Cache-Salt"
"""The header that names a tenant, or whoever else must not learn what others asked."""

_GONE = 499  # as nginx says it; nobody reads it

_call: ContextVar[Call] = ContextVar("call")


@dataclass
class Call:
    """One request of a client.

    Args:
        salt: from its header: only requests of equal salt share cached blocks.
        receive: tells when the client has gone.
    """

    salt: str | None
    receive: Receive
    _handles: list[RequestHandle] = field(default_factory=list)

    def owns(self, handle: RequestHandle) -> RequestHandle:
        """Ends with the call, whatever ends that."""
        self._handles.append(handle)
        return handle

    async def result(self, handle: RequestHandle) -> GenerationResult:
        """The result, unless the client goes away before.

        Raises:
            RequestError: it did; the request is dropped.
        """
        ended, gone = asyncio.ensure_future(handle), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise RequestError("expected a client that waits, got one that has gone", _GONE)
            return ended.result()
        finally:
            gone.cancel()
            ended.cancel()

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
    """Middleware that makes a `Call` of each request, and ends it with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        given = dict(scope.get("headers", ())).get(HEADER.lower().encode())
        call = Call(None if given is None else given.decode("latin-1"), receive)
        token = _call.set(call)
        try:
            await self._app(scope, receive, send)
        finally:
            _call.reset(token)
            call.end()
