"""A replica: the server of one process, called with requests instead of listening for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from compiled_attn.serve.app import app_of
from compiled_attn.serve.metrics import exposition
from compiled_attn.serve.served import Make, Served

__all__ = ["Replica", "State"]


class State(NamedTuple):
    """How far a replica is.

    Attributes:
        process: its id, another one after a restart.
        stage: see `Served.stage`.
        error: what ended its start, None while nothing did.
    """

    process: int
    stage: str
    error: str | None


class Replica:
    """An actor of Ray, with an engine of its own; it begins to load and warm up at once.

    Args:
        name: of the model.
        make: loads it and warms it up.
    """

    def __init__(self, name: str, make: Make) -> None:
        self._served = Served(name, make)
        self._app: ASGIApp = app_of(self._served)
        self._left: dict[str, asyncio.Event] = {}
        self._served.start(lambda: None)

    async def state(self) -> State:
        """How far it is."""
        error = self._served.error
        return State(os.getpid(), self._served.stage, None if error is None else str(error))

    async def metrics(self) -> str:
        """Its figures in the format of Prometheus; waits for the step that runs."""
        return (await asyncio.to_thread(exposition, self._served)).decode()

    async def answer(
        self, call: str, scope: Mapping[str, Any], body: bytes
    ) -> AsyncIterator[Message]:
        """The answer to a request, in the messages of ASGI.

        Args:
            call: names it for `leave`.
            scope: of ASGI.
            body: all of it.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        left = self._left[call] = asyncio.Event()
        bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if (first := next(bodies, None)) is not None:
                return first
            await left.wait()
            return {"type": "http.disconnect"}

        running = asyncio.ensure_future(self._app(dict(scope), receive, sent.put))
        running.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
            running.exception()  # it was answered with 500
        finally:
            running.cancel()
            del self._left[call]

    async def leave(self, call: str) -> None:
        """The client of a call has gone: its request is dropped."""
        if (left := self._left.get(call)) is not None:
            left.set()
