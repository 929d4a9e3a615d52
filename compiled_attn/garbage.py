"""Collects garbage more rarely during a start."""

from __future__ import annotations

import gc
import threading
from contextlib import ContextDecorator

__all__ = ["rare_collections"]

_THRESHOLDS = 50_000, 20, 100


class _RareCollections(ContextDecorator):
    """A context, also for several threads at once, in which garbage is collected rarely.

    Imports, loading and compiles make objects by the million, and keep them: collections took 6 to
    8 % of a start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = gc.get_threshold()
                gc.set_threshold(*_THRESHOLDS)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                gc.set_threshold(*self._before)


rare_collections = _RareCollections()
