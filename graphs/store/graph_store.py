"""A backend with its store, opened by name."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from graphs.backends.accelerator import AcceleratorBackend
from graphs.backends.cudagraph import CudaGraphBackend
from graphs.capture.contract import Backend
from graphs.errors import StoreError
from graphs.store.factors import environment_factors
from graphs.store.inductor import StoredInductor
from graphs.store.inductor_cache import InductorCache
from graphs.store.store import ArtifactStore
from graphs.store.stored import StoredAoti

__all__ = ["STORED", "GraphStore", "open_store"]

STORED = ("inductor", "aoti", "cudagraph", "accelerator")
"""Backends whose graphs can be stored."""


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
    if backend == "aoti":
        return GraphStore(StoredAoti(ArtifactStore(folder)))
    _refuse_unquoted(folder.expanduser().resolve())
    store = ArtifactStore(folder)
    cache = store.inductor_cache(environment_factors()).__enter__()
    inductor = StoredInductor(store, cache.seal)
    recorded: Mapping[str, Callable[..., Backend]] = {
        "cudagraph": CudaGraphBackend,
        "accelerator": AcceleratorBackend,
    }
    stored = recorded[backend](inductor=inductor) if backend in recorded else inductor
    return GraphStore(stored, cache)


def _refuse_unquoted(folder: Path) -> None:
    """Raises StoreError for a name that inductor, which does not quote it, gives g++ in parts."""
    name = str(folder)
    try:
        is_whole = shlex.split(name) == [name]
    except ValueError:  # an open quotation
        is_whole = False
    if not is_whole:
        raise StoreError(
            f"expected a store in a folder without spaces, quotes and backslashes in its path, got "
            f"{name!r}, where inductor cannot compile: name another folder"
        )
