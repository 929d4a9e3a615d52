"""The server: it listens at once, warms up meanwhile, and serves to the end what it was asked."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from compiled_attn.errors import ConfigError
from compiled_attn.serve.app import app_of
from compiled_attn.serve.served import Served
from compiled_attn.serve.settings import ServerSettings

__all__ = ["bound", "run"]

_SWITCH_SECONDS = 0.001


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any free one.

    Raises:
        ConfigError: it is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named: without it each answer on a kept
    # connection waits 40 ms for an acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error}: choose another --port or --host"
        ) from error
    return listening


def run(
    served: Served,
    listening: socket.socket,
    when_up: Callable[[], None],
    settings: ServerSettings | None = None,
) -> None:
    """Serves until a signal ends it; then what was asked is answered, and nothing new taken.

    A second signal ends the process at once, without cleaning up.

    Raises:
        Exception: what ended the start of the model.
    """
    settings = settings or ServerSettings()
    # Threads that parse and tokenize give up the GIL sooner: /health answers meanwhile.
    sys.setswitchinterval(_SWITCH_SECONDS)
    config = uvicorn.Config(
        app_of(served, settings),
        log_level="warning",
        access_log=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    server = _Server(config, served)

    def give_up() -> None:
        server.should_exit = True

    served.start(give_up)
    when_up()
    server.run(sockets=[listening])
    if served.error is not None:
        raise served.error


class _Server(uvicorn.Server):
    """Goes on listening while it drains, so that ``/health`` tells of it."""

    def __init__(self, config: uvicorn.Config, served: Served) -> None:
        super().__init__(config)
        self._served = served

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain; the second time ends the process."""
        if self._served.is_draining:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + sig)
        super().handle_exit(sig, frame)
        self._served.is_draining = True
        self.should_exit = not self._served.open_requests

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        if self._served.is_draining and not self._served.open_requests:
            self.should_exit = True
        return await super().on_tick(counter)
