"""The front of a fleet: it listens, has each request answered, and again if its replica ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ray.exceptions import RayActorError
from starlette.types import Message, Receive, Scope, Send

from compiled_attn.contrib.replicas.fleet import Fleet

__all__ = ["Front"]

_AGAIN = 0.1  # seconds, in which Serve learns that a replica has ended


class _Unready(Exception):
    """A replica that says so: its engine has failed."""


class _Answer:
    """What a client gets; its head waits for the first part of the body."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send
        self._head: Message = {}
        self._number = 0

    async def put(self, number: int, messages: list[Message]) -> None:
        """The next messages of a replica.

        Raises:
            _Unready: it is 503.
        """
        self._number = number
        for message in messages:
            if message["type"] == "http.response.start":
                if message["status"] == 503:
                    raise _Unready
                self._head = message
            elif message.get("body") or not message.get("more_body"):
                if not self.has_begun:
                    self.has_begun = True
                    await self._send(self._head)
                await self._send(message)

    async def cut(self) -> None:
        """Ends a stream whose replica has ended, with an event that says so."""
        told = f"replica {self._number} ended while it streamed this answer: ask again"
        error = {"message": told, "type": "server_error", "param": None, "code": None}
        event = f"data: {json.dumps({'error': error})}\n\n".encode()
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


class Front:
    """An ASGI application; each of its requests is answered by one replica of a fleet.

    Args:
        fleet: of replicas.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request; it ends with its client."""
        body = await _body(receive)
        if body is None:
            return
        left = asyncio.ensure_future(_left(receive))
        answering = asyncio.ensure_future(self._answer(_plain(scope), body, _Answer(send)))
        try:
            await asyncio.wait((left, answering), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            left.cancel()
            answering.cancel()

    async def _answer(self, scope: dict[str, Any], body: bytes, answer: _Answer) -> None:
        while True:
            call = self._fleet.answer(scope, body)
            try:
                async for number, messages in call:
                    await answer.put(number, messages)
                return
            except (RayActorError, _Unready):
                if answer.has_begun:
                    return await answer.cut()
            finally:
                call.cancel()  # if its client has left, or it is unready
            self._fleet.retried += 1
            await asyncio.sleep(_AGAIN)


def _plain(scope: Scope) -> dict[str, Any]:
    """What of a scope can go to another process."""
    kept = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path",
            "query_string", "headers", "client", "server")  # fmt: skip
    return {name: scope[name] for name in kept if name in scope}


async def _body(receive: Receive) -> bytes | None:
    """All of it; None: the client has left."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
    return None


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
