"""Runs the server: it listens at once, warms up meanwhile, and drains when it is stopped."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from compiled_attn.errors import ConfigError
from compiled_attn.serve.app import create_app
from compiled_attn.serve.model import ServedModel
from compiled_attn.serve.settings import ServerSettings

__all__ = ["listen", "run"]

_SWITCH_SECONDS = 0.001


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there (port 0: any free one), or raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named: without it each answer on a reused
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
    model: ServedModel,
    listening: socket.socket,
    on_listening: Callable[[], None],
    settings: ServerSettings | None = None,
) -> None:
    """Serves until a signal; then answers open requests, and accepts no new ones.

    A second signal ends the process at once, without cleaning up. Raises what ended loading.
    """
    settings = settings or ServerSettings()
    # Threads that parse and tokenize give up the GIL sooner: /health answers meanwhile.
    sys.setswitchinterval(_SWITCH_SECONDS)
    config = uvicorn.Config(
        create_app(model, settings),
        log_level="warning",
        access_log=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    server = _Server(config, model)

    def exit_server() -> None:
        server.should_exit = True

    model.start(exit_server)
    on_listening()
    server.run(sockets=[listening])
    if model.error is not None:
        raise model.error


class _Server(uvicorn.Server):
    """Keeps listening while it drains, so that ``/health`` reports it."""

    def __init__(self, config: uvicorn.Config, model: ServedModel) -> None:
        super().__init__(config)
        self._model = model

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain; the second time ends the process."""
        if self._model.is_draining:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + sig)
        super().handle_exit(sig, frame)
        self._model.is_draining = True
        self.should_exit = not self._model.open_requests

    async def on_tick(self, counter: int) -> bool:
        """Runs ten times a second; True ends the server."""
        if self._model.is_draining and not self._model.open_requests:
            self.should_exit = True
        return await super().on_tick(counter)
