"""The store that an engine loads its graphs from."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from compiled_attn.engine.config import ConfigError
from graphs.backends.accelerator import AcceleratorBackend
from graphs.backends.cudagraph import CudaGraphBackend
from graphs.capture.contract import Backend
from graphs.store import (
    ArtifactStore,
    InductorCache,
    StoredAoti,
    StoredInductor,
    environment_factors,
)
from graphs.store.cache_folder import cache_folder

__all__ = ["STORED", "GraphStore", "default_store", "open_store", "store_of"]

STORED = ("inductor", "aoti", "cudagraph", "accelerator")
"""Backends whose graphs can be stored."""

_log = logging.getLogger(__name__)


def default_store() -> Path:
    """Returns the folder of the default store.

    Raises:
        StoreError: the user's home is unknown.
    """
    return cache_folder("compiled-attn")


@dataclass(frozen=True)
class GraphStore:
    """A backend, and the compile cache of inductor in its store."""

    backend: str | Backend
    cache: InductorCache | None = None

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Makes inductor compile into the store; restores the environment afterwards."""
        variables = {} if self.cache is None else self.cache.environment
        before = {name: os.environ.get(name) for name in variables}
        try:
            os.environ.update(variables)
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """Allows other processes to clean the cache."""
        if self.cache is not None:
            self.cache.__exit__()


def open_store(backend: str, folder: Path) -> GraphStore:
    """Opens the store in a folder for a backend.

    Raises:
        OSError, StoreError: the folder cannot be used.
    """
    store = ArtifactStore(folder)
    if backend == "aoti":
        return GraphStore(StoredAoti(store))
    cache = store.inductor_cache(environment_factors()).__enter__()
    inductor = StoredInductor(store, cache.seal)
    recorded: Mapping[str, Callable[..., Backend]] = {
        "cudagraph": CudaGraphBackend,
        "accelerator": AcceleratorBackend,
    }
    stored = recorded[backend](inductor=inductor) if backend in recorded else inductor
    return GraphStore(stored, cache)


def store_of(backend: str | Backend, store: bool | str | Path | None) -> GraphStore:
    """Returns the backend of an engine, with the store of its configuration.

    Args:
        backend: a name, or an object, which has a store of its own or none.
        store: its folder; True: the default one, or none if that fails; else none.

    Raises:
        ConfigError: the configured folder cannot be used, or not with this backend.
    """
    if not isinstance(backend, str) or store is None or store is False:
        return GraphStore(backend)
    if backend not in STORED:
        if store is True:
            return GraphStore(backend)
        raise ConfigError(
            f"expected a backend of {STORED} with a store, got {backend!r}: leave one of them out"
        )
    try:
        stored = open_store(backend, default_store() if store is True else Path(store))
    except (OSError, RuntimeError) as error:  # a StoreError, or no home folder
        if store is not True:
            raise ConfigError(f"{error}") from error
        _log.warning("nothing is stored for the next start: %s", error)
        return GraphStore(backend)
    chosen = stored.backend
    reason = None if store is not True or isinstance(chosen, str) else chosen.available()
    if reason:
        stored.close()
        _log.warning("nothing is stored for the next start: %s", reason)
        return GraphStore(backend)
    return stored
