"""A replica: the server of one process, called with requests instead of listening for them."""

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

_ALONE = 600.0  # seconds


class State(NamedTuple):
    """A replica that is ready.

    Attributes:
        number: its rank among those of its deployment; one that takes its place has the same.
        process: its id.
    """

    number: int
    process: int


class Replica:
    """What Ray Serve deploys: an engine of its own, warm as soon as it is constructed.

    Args:
        name: of the model.
        make: loads it and warms it up.

    Raises:
        Exception: what ended that.
    """

    def __init__(self, name: str, make: LoadModel) -> None:
        self._served = ServedModel(name, make)
        self._served.load()
        # The front has limited bodies already, maybe to more than the default.
        self._metrics = Metrics(self._served)
        settings = ServerSettings(max_body=sys.maxsize)
        self._app: ASGIApp = create_app(self._served, settings, self._metrics)
        self._asked = time.monotonic()

    async def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that fails it.

        An application of Serve outlives who started it. If its front was killed, and so could not
        end it, its replicas do.

        Raises:
            EngineStopped: its engine has failed.
        """
        if time.monotonic() - self._asked > _ALONE:
            application = serve.get_replica_context().app_name
            await asyncio.to_thread(serve.delete, application, _blocking=False)
        if self._served.stage != "ready":
            raise EngineStopped("expected an engine that serves, got one that has failed")

    async def state(self) -> State:
        """What it is, for the front; that asks shows that there is one."""
        self._asked = time.monotonic()
        return State(_number(), os.getpid())

    async def metrics(self) -> tuple[int, str]:
        """Its number, and its figures in the format of Prometheus; waits for the step that runs."""
        return _number(), (await asyncio.to_thread(self._metrics.exposition)).decode()

    async def answer(
        self, scope: Mapping[str, Any], body: bytes
    ) -> AsyncIterator[tuple[int, list[Message]]]:
        """The answer to a request, in the messages of ASGI; cancelled, it drops the request.

        Args:
            scope: of ASGI.
            body: all of it.

        Yields:
            The replica's number, and the messages that have come since.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not parts:
                await asyncio.Event().wait()  # a client that leaves is a call that is cancelled
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
            running.exception()  # it was answered with 500
        finally:
            running.cancel()


def _number() -> int:
    return int(serve.get_replica_context().rank.rank)
