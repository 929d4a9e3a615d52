"""Runs a fleet: Ray on this machine or a cluster, and the frontend that listens here."""

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

from compiled_attn.contrib.replicas.app import fleet_app
from compiled_attn.contrib.replicas.deployment import deploy
from compiled_attn.contrib.replicas.fleet import Fleet
from compiled_attn.contrib.replicas.replica import Replica
from compiled_attn.errors import ConfigError, ModelError
from compiled_attn.serve.guard import with_cors, with_limits
from compiled_attn.serve.model import LoadModel
from compiled_attn.serve.settings import ServerSettings

__all__ = ["run_fleet"]


def run_fleet(
    name: str,
    make: LoadModel,
    count: int,
    listening: socket.socket,
    on_listening: Callable[[], None],
    report: Callable[[str], None],
    http: ServerSettings | None = None,
    *,
    address: str | None = None,
    cpus: int = 1,
    gpus: int = 0,
) -> None:
    """Serve until a signal; then finish open requests and accept no new ones.

    Args:
        name, make: of the model, see `ServedModel`; pickled.
        count: number of replicas.
        listening: socket of the frontend.
        on_listening: called when it listens.
        report: called with a line when the number of ready replicas changes.
        http: settings of the frontend; None: defaults.
        address: of a Ray cluster; None: start one on this machine.
        cpus, gpus: that a replica reserves.

    Raises:
        ConfigError: no cluster answers at the address.
        ModelError: no replica can serve, with the reason of the last one.
    """
    _connect(address, count * cpus)
    try:
        with deploy(Replica, (name, make), count, cpus=cpus, gpus=gpus) as handle:
            _serve(Fleet(handle, count, report), listening, on_listening, http or ServerSettings())
    finally:
        ray.shutdown()


_NO_CLUSTER = (
    "start one with `ray start --head`, and set RAY_AUTH_MODE=token here if it asks for tokens"
)


def _connect(address: str | None, cpus: int) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    own: dict[str, Any] = {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
    try:
        ray.init(
            _resolve(address) if address else "local",
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
        signal.signal(signal.SIGTERM, handler)  # Ray replaces it


def _resolve(address: str) -> str:
    """Host and port, after a test connection: Ray itself would retry for minutes."""
    found: str | None = canonicalize_bootstrap_address(address)
    if found is None:  # Ray's "local"
        raise ValueError("expected HOST:PORT or auto")
    host, _, port = found.rpartition(":")
    socket.create_connection((host.strip("[]"), port), timeout=10).close()
    return found


def _serve(
    fleet: Fleet, listening: socket.socket, on_listening: Callable[[], None], http: ServerSettings
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
    on_listening()
    server.run(sockets=[listening])
    if fleet.error is not None:
        raise ModelError(fleet.error)


class _Server(uvicorn.Server):
    """Drops open requests on a second signal."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; the second time, drop open requests."""
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)
