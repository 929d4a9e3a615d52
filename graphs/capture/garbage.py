"""Pauses Python's cyclic garbage collection during captures."""

from __future__ import annotations

import gc
import threading

__all__ = ["collection_paused"]


class _CollectionPaused:
    """A context manager that any number of threads may enter; the last one to leave resumes.

    A compile makes millions of objects that live until its end, and each collection would visit
    them and all that torch has loaded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()


collection_paused = _CollectionPaused()
