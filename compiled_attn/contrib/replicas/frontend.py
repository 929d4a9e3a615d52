"""An ASGI application that forwards requests to replicas, and retries if a replica exits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ray.exceptions import RayActorError
from starlette.types import Message, Receive, Scope, Send

from compiled_attn.contrib.replicas.fleet import Fleet

__all__ = ["Frontend"]

_RETRY_S = 0.1  # until Serve notices that a replica exited


class _Unready(Exception):
    """A replica responded 503: its engine has failed."""


class _Response:
    """The response to a client; its head is sent with the first part of the body."""

    def __init__(self, send: Send) -> None:
        self.has_started = False
        self._send = send
        self._head: Message = {}
        self._number = 0

    async def put(self, number: int, messages: list[Message]) -> None:
        """Forward the next messages of a replica; raises _Unready on 503."""
        self._number = number
        for message in messages:
            if message["type"] == "http.response.start":
                if message["status"] == 503:
                    raise _Unready
                self._head = message
            elif message.get("body") or not message.get("more_body"):
                if not self.has_started:
                    self.has_started = True
                    await self._send(self._head)
                await self._send(message)

    async def abort(self) -> None:
        """End a stream whose replica exited with an error event."""
        message = f"replica {self._number} exited while it streamed this response: send it again"
        error = {"message": message, "type": "server_error", "param": None, "code": None}
        event = f"data: {json.dumps({'error': error})}\n\n".encode()
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


class Frontend:
    """Forwards each request to one replica of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; cancelled when the client disconnects."""
        body = await _body(receive)
        if body is None:
            return
        leaving = asyncio.ensure_future(_disconnect(receive))
        serving = asyncio.ensure_future(self._serve(_plain(scope), body, _Response(send)))
        try:
            await asyncio.wait((leaving, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            leaving.cancel()
            serving.cancel()

    async def _serve(self, scope: dict[str, Any], body: bytes, response: _Response) -> None:
        while True:
            call = self._fleet.answer(scope, body)
            try:
                async for number, messages in call:
                    await response.put(number, messages)
                return
            except (RayActorError, _Unready):
                if response.has_started:
                    return await response.abort()
            finally:
                call.cancel()
            self._fleet.retried += 1
            await asyncio.sleep(_RETRY_S)


def _plain(scope: Scope) -> dict[str, Any]:
    """The part of a scope that can be pickled."""
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path",
            "query_string", "headers", "client", "server")  # fmt: skip
    return {name: scope[name] for name in names if name in scope}


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None: the client disconnected."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
    return None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
