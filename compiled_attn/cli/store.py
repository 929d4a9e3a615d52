"""The store that ``compiled-attn run`` starts from, and the one place that tells inductor of it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from compiled_attn.cli.errors import UserError
from graphs.backends.cudagraph import CudaGraphBackend
from graphs.capture.contract import Backend
from graphs.store import ArtifactStore, StoredAoti, StoredInductor, environment_factors
from graphs.store.cache_folder import cache_folder

__all__ = ["default_store", "stored_backend"]

_log = logging.getLogger(__name__)


def default_store() -> Path:
    """The folder of the default store.

    Raises:
        StoreError: the user's home is unknown.
    """
    return cache_folder("compiled-attn")


@contextlib.contextmanager
def stored_backend(backend: str, store: Path | None) -> Iterator[str | Backend]:
    """The backend of that name, which keeps its graphs in the store if it is able to.

    Args:
        backend: as in ``--backend``.
        store: its folder. None: the default one, or none if that cannot be used.

    Raises:
        UserError: the folder that was asked for cannot be used, or not with this backend.
    """
    if backend not in ("inductor", "aoti", "cudagraph"):
        if store is not None:
            raise UserError(
                "--store is for --backend inductor, aoti and cudagraph, got "
                f"{backend}: leave one of them out"
            )
        yield backend
        return
    with contextlib.ExitStack() as stack:
        try:
            chosen: str | Backend = _opened(backend, store or default_store(), stack)
        except (OSError, RuntimeError) as error:  # a StoreError, or there is no home folder
            if store is not None:
                raise UserError(str(error)) from error
            _log.warning("nothing is stored for the next start: %s", error)
            chosen = backend
        yield chosen


def _opened(backend: str, folder: Path, stack: contextlib.ExitStack) -> Backend:
    store = ArtifactStore(folder)
    if backend == "aoti":
        return StoredAoti(store)
    cache = stack.enter_context(store.inductor_cache(environment_factors()))
    stack.enter_context(_variables(cache.environment))
    inductor = StoredInductor(store, cache.seal)
    return CudaGraphBackend(inductor=inductor) if backend == "cudagraph" else inductor


@contextlib.contextmanager
def _variables(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    try:
        os.environ.update(wanted)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
