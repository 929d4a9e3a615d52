"""The front of a fleet: it listens, sends each request to a replica, and again if that one ends."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError
from starlette.types import Message, Receive, Scope, Send

from compiled_attn.replicas.fleet import Fleet, Member
from compiled_attn.replicas.prompt_keys import prompt_keys
from compiled_attn.serve.call import HEADER

__all__ = ["Front"]


class _Unready(Exception):
    """A replica that says so: it has just been restarted, or its engine has stopped."""


class _Answer:
    """What a client gets; its head waits for the first part of the body."""

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send
        self._head: Message = {}

    async def put(self, message: Message) -> None:
        """The next message of a replica.

        Raises:
            _Unready: it is 503.
        """
        if message["type"] == "http.response.start":
            if message["status"] == 503:
                raise _Unready
            self._head = message
        elif message.get("body") or not message.get("more_body"):
            if not self.has_begun:
                self.has_begun = True
                await self._send(self._head)
            await self._send(message)

    async def cut(self, number: int) -> None:
        """Ends a stream whose replica has ended, with an event that says so."""
        told = f"replica {number} ended while it streamed this answer: ask again"
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
        """Handles one request."""
        body = await _body(receive)
        if body is None:
            return
        headers = dict(scope["headers"])
        keys = prompt_keys(body, headers.get(HEADER.lower().encode(), b""))
        left = asyncio.ensure_future(_left(receive))
        answering = asyncio.ensure_future(self._answer(_plain(scope), body, keys, left, send))
        try:
            await asyncio.wait((left, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                await asyncio.wait((answering,), timeout=5)  # its replica has been told
            if answering.done():
                answering.result()
        finally:
            left.cancel()
            answering.cancel()

    async def _answer(
        self,
        scope: Mapping[str, Any],
        body: bytes,
        keys: list[int],
        left: asyncio.Future[None],
        send: Send,
    ) -> None:
        answer = _Answer(send)
        while not left.done():
            member, route = await self._fleet.routed(keys)
            try:
                return await _relay(member, scope, body, answer, left)
            except (RayActorError, _Unready):
                self._fleet.lost(member)
                if answer.has_begun:
                    return await answer.cut(member.number)
                self._fleet.retried += 1
            finally:
                self._fleet.router.done(route)


async def _relay(
    member: Member,
    scope: Mapping[str, Any],
    body: bytes,
    answer: _Answer,
    left: asyncio.Future[None],
) -> None:
    """Sends on what a replica answers; tells it when the client has left."""
    call = uuid.uuid4().hex

    def leave(gone: asyncio.Future[None]) -> None:
        member.actor.leave.remote(call)

    left.add_done_callback(leave)
    try:
        messages = member.actor.answer.options(num_returns="streaming").remote(call, scope, body)
        async for message in messages:
            await answer.put(await message)
    finally:
        left.remove_done_callback(leave)


def _plain(scope: Scope) -> dict[str, Any]:
    """What of a scope can go to another process. By ASGI 2.3 an application asks whether the
    client has left; later ones would learn it by sending."""
    kept = ("type", "http_version", "method", "scheme", "path", "raw_path", "root_path",
            "query_string", "headers", "client", "server")  # fmt: skip
    asgi = {"version": "3.0", "spec_version": "2.3"}
    return {name: scope[name] for name in kept if name in scope} | {"asgi": asgi}


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
