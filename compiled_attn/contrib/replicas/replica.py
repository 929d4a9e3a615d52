"""A replica: the server application in a Ray Serve actor."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from ray import serve
from starlette.types import ASGIApp, Message

from compiled_attn.errors import EngineStopped
from compiled_attn.serve.app import create_app
from compiled_attn.serve.metrics import Metrics
from compiled_attn.serve.model import LoadModel, ServedModel
from compiled_attn.serve.settings import ServerSettings

__all__ = ["Replica", "State"]

_ORPHANED_S = 600.0


class State(NamedTuple):
    """A replica that is ready.

    Attributes:
        number: its rank in the deployment; a replacement has the same.
        process: its id.
    """

    number: int
    process: int


class Replica:
    """The class that Ray Serve deploys; the constructor loads and warms up an engine.

    Args:
        name: of the model.
        make: loads it and warms it up.
    """

    def __init__(self, name: str, make: LoadModel) -> None:
        self._served = ServedModel(name, make)
        self._served.load()
        self._metrics = Metrics(self._served)
        # The frontend has already limited the body, perhaps above the default.
        settings = ServerSettings(max_body=sys.maxsize)
        self._app: ASGIApp = create_app(self._served, settings, self._metrics)
        self._last_poll = time.monotonic()

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that fails.

        A Serve application outlives the process that started it, so replicas delete it if the
        frontend was killed.

        Raises:
            EngineStopped: its engine has failed.
        """
        if time.monotonic() - self._last_poll > _ORPHANED_S:
            application = serve.get_replica_context().app_name
            await asyncio.to_thread(serve.delete, application, _blocking=False)
        if self._served.stage != "ready":
            raise EngineStopped("expected an engine that serves, got one that has failed")

    async def state(self) -> State:
        """Return number and process; called regularly by a live frontend."""
        self._last_poll = time.monotonic()
        return State(_number(), os.getpid())

    async def metrics(self) -> tuple[int, str]:
        """Return number and metrics in Prometheus' format; waits for the running step."""
        return _number(), (await asyncio.to_thread(self._metrics.exposition)).decode()

    async def answer(
        self, scope: Mapping[str, Any], body: bytes
    ) -> AsyncIterator[tuple[int, list[Message]]]:
        """Yield the replica's number and the ASGI messages of a response as they arrive.

        Cancellation aborts the request.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not parts:
                await asyncio.Event().wait()  # a disconnect cancels the call instead
            return parts.pop()

        running = asyncio.ensure_future(self._app(dict(scope), receive, sent.put))
        running.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            last: Message | None = {}
            while last is not None:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                last = messages[-1]
                if some := [each for each in messages if each is not None]:
                    yield _number(), some
            running.exception()  # the response was 500
        finally:
            running.cancel()


def _number() -> int:
    return int(serve.get_replica_context().rank.rank)
