"""The store that an engine loads its graphs from."""

from __future__ import annotations

import logging
from pathlib import Path

from compiled_attn.engine.config import ConfigError
from graphs.capture.contract import Backend
from graphs.store.cache_folder import cache_folder
from graphs.store.graph_store import STORED, GraphStore, open_store

__all__ = ["default_store", "store_of"]

_log = logging.getLogger(__name__)


def default_store() -> Path:
    """Returns the folder of the default store.

    Raises:
        StoreError: the user's home is unknown.
    """
    return cache_folder("compiled-attn")


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
