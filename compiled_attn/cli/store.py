"""The store of compiled graphs that the commands use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from compiled_attn.cli.errors import UserError
from compiled_attn.engine.graph_store import default_store
from graphs.capture.contract import Backend
from graphs.store.graph_store import STORED, open_store

__all__ = ["default_store", "stored_backend"]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def stored_backend(backend: str, store: Path | None) -> Iterator[str | Backend]:
    """Opens a backend that stores its graphs, where it can.

    ``store`` None is the default folder, or none if that cannot be used. Raises UserError if a
    given folder cannot be used, or not with this backend.
    """
    if backend not in STORED:
        if store is not None:
            raise UserError(
                f"--store is for --backend {', '.join(STORED)}, got {backend}: leave one of them "
                "out"
            )
        yield backend
        return
    with contextlib.ExitStack() as stack:
        chosen: str | Backend = backend
        try:
            stored = open_store(backend, store or default_store())
        except (OSError, RuntimeError) as error:  # a StoreError, or there is no home folder
            if store is not None:
                raise UserError(str(error)) from error
            _log.warning("nothing is stored for the next start: %s", error)
        else:
            stack.callback(stored.close)
            stack.enter_context(stored.capturing())
            chosen = stored.backend
        yield chosen
