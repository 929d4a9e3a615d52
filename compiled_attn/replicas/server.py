"""The server of a fleet: Ray on this machine or a cluster, and the front that listens here."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import ray
import uvicorn
from ray._private.services import canonicalize_bootstrap_address

from compiled_attn.errors import ConfigError, ModelError
from compiled_attn.replicas.app import fleet_app
from compiled_attn.replicas.deployment import deployed
from compiled_attn.replicas.fleet import Fleet
from compiled_attn.replicas.replica import Replica
from compiled_attn.serve.guard import with_cors, with_limits
from compiled_attn.serve.model import LoadModel
from compiled_attn.serve.settings import ServerSettings

__all__ = ["run_fleet"]


def run_fleet(
    name: str,
    make: LoadModel,
    count: int,
    listening: socket.socket,
    when_up: Callable[[], None],
    tell: Callable[[str], None],
    http: ServerSettings | None = None,
    *,
    address: str | None = None,
    cpus: int = 1,
    gpus: int = 0,
) -> None:
    """Serves until a signal ends it; then what was asked is answered, and nothing new taken.

    Args:
        name, make: of the model, see `ServedModel`; pickled.
        count: of replicas.
        listening: where the front listens.
        when_up: called when it does.
        tell: called with a line when a replica is ready, or is lost.
        http: settings of the front; None: the default ones.
        address: of a cluster of Ray; None: one of this process's own, on this machine.
        cpus, gpus: that a replica reserves.

    Raises:
        ConfigError: no cluster answers there.
        ModelError: no replica can serve, with the reason of the last one.
    """
    _connect(address, count * cpus)
    try:
        with deployed(Replica, (name, make), count, cpus=cpus, gpus=gpus) as handle:
            _serve(Fleet(handle, count, tell), listening, when_up, http or ServerSettings())
    finally:
        ray.shutdown()


_NO_CLUSTER = (
    "start one with `ray start --head`, and set RAY_AUTH_MODE=token here if it asks for tokens"
)


def _connect(address: str | None, cpus: int) -> None:
    when_terminated = signal.getsignal(signal.SIGTERM)
    own: dict[str, Any] = {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
    try:
        ray.init(
            _reached(address) if address else "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if address else own),
        )
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).strip().partition("\n")[0]
        remedy = _NO_CLUSTER if address else "see `ray status`"
        raise ConfigError(
            f"cannot use Ray at {address or 'this machine'}: {why}: {remedy}"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, when_terminated)  # Ray has set its own


def _reached(address: str) -> str:
    """The same as host and port, where somebody listens; Ray itself would try for minutes.

    Raises:
        OSError, ValueError: nobody does, or it is no address.
    """
    found: str | None = canonicalize_bootstrap_address(address)
    if found is None:  # Ray's "local"
        raise ValueError("expected HOST:PORT or auto")
    host, _, port = found.rpartition(":")
    socket.create_connection((host.strip("[]"), port), timeout=10).close()
    return found


def _serve(
    fleet: Fleet, listening: socket.socket, when_up: Callable[[], None], http: ServerSettings
) -> None:
    def give_up() -> None:
        server.should_exit = True

    app = with_cors(with_limits(fleet_app(fleet, give_up), http), http)
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            ssl_certfile=http.ssl_certfile,
            ssl_keyfile=http.ssl_keyfile,
        )
    )
    when_up()
    server.run(sockets=[listening])
    if fleet.error is not None:
        raise ModelError(fleet.error)


class _Server(uvicorn.Server):
    """Stops waiting for open requests with a second signal of either kind."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to stop; the second time drops what is open."""
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)
