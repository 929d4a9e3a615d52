"""The server: it listens at once, warms up meanwhile, and serves to the end what it was asked."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from compiled_attn.errors import ConfigError
from compiled_attn.serve.app import app_of
from compiled_attn.serve.served import Served

__all__ = ["bound", "run"]


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any free one.

    Raises:
        ConfigError: it is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
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


def run(served: Served, listening: socket.socket, when_up: Callable[[], None]) -> None:
    """Serves until a signal ends it; then what was asked is answered, and nothing new taken.

    Raises:
        Exception: what ended the start of the model.
    """
    server = uvicorn.Server(uvicorn.Config(app_of(served), log_level="warning", access_log=False))

    def give_up() -> None:
        server.should_exit = True

    served.start(give_up)
    when_up()
    server.run(sockets=[listening])
    if served.error is not None:
        raise served.error
