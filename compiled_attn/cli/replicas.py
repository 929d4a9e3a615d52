"""The command ``serve --replicas``."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from compiled_attn.cli.errors import UserError
from compiled_attn.cli.inputs import dtype_of
from compiled_attn.cli.options import EngineOptions, ServeOptions, settings_of
from compiled_attn.cli.store import default_store, stored_backend
from compiled_attn.engine import EngineConfig
from compiled_attn.text import LLM
from graphs import BucketEvent, from_file
from graphs.capture.contract import Backend
from graphs.installation import install_command
from graphs.store.lock import Lock

if TYPE_CHECKING:
    from compiled_attn.serve.settings import ServerSettings

__all__ = ["serve_replicas", "serving_backend", "serving_config"]


def serving_backend(
    options: EngineOptions,
) -> contextlib.AbstractContextManager[str | Backend]:
    """Returns the backend of a server, with its store unless ``--no-store``.

    Raises UserError for contradicting options, or a store that cannot be used.
    """
    if options.store is not None and options.no_store:
        raise UserError("--store and --no-store were both given: choose whether to use a store")
    if options.no_store:
        return contextlib.nullcontext(options.backend)
    return stored_backend(options.backend, options.store)


def serving_config(options: EngineOptions, backend: str | Backend) -> EngineConfig:
    """Returns the engine settings of a server; raises ValueError for those that are refused."""
    # The backend already has its store, if any.
    settings = settings_of(options) | {"backend": backend, "store": False}
    if options.buckets is not None:
        space = settings["buckets"] = from_file(options.buckets)
        settings["max_graphs"] = max(options.max_graphs, len(space))
    return EngineConfig(**settings, watch_process=True)


def serve_replicas(
    options: ServeOptions,
    listening: socket.socket,
    on_listening: Callable[[], None],
    report: Callable[[str], None],
    http: ServerSettings,
) -> None:
    """Serves until a signal; raises UserError if Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        from compiled_attn.contrib.replicas.server import run_fleet
    except ImportError as error:
        raise UserError(
            f"--replicas needs a package that is not installed: {error}: {install_command('ray')}"
        ) from error
    assert options.replicas is not None
    cores = 1 if options.address else (os.cpu_count() or 1) // options.replicas
    threads = options.threads or max(cores, 1)
    run_fleet(
        options.name or options.model.stem,
        partial(_load, options, threads),
        options.replicas,
        listening,
        on_listening,
        report,
        http,
        address=options.address,
        cpus=threads,
        gpus=int(options.device.startswith("cuda")),
    )


def _load(options: ServeOptions, threads: int, progress: Callable[[BucketEvent], None]) -> LLM:
    torch.set_num_threads(threads)
    open_store = contextlib.ExitStack()
    atexit.register(open_store.close)
    backend = open_store.enter_context(serving_backend(options))
    config = serving_config(options, backend)
    with contextlib.nullcontext() if isinstance(backend, str) else _first_alone():
        return LLM(
            options.model, config, dtype=dtype_of(options), device=options.device, progress=progress
        )


@contextlib.contextmanager
def _first_alone() -> Iterator[None]:
    """Let the first process of a machine fill the store; the others then load concurrently."""
    with contextlib.closing(Lock(default_store() / "warmup.lock")) as lock:
        if not lock.take():
            while not lock.take(shared=True):
                time.sleep(0.1)
        yield
