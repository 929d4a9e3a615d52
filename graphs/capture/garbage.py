"""Cyclic garbage, which Python collects between captures and not in them."""

from __future__ import annotations

import gc
import threading

__all__ = ["collected_later"]


class _CollectedLater:
    """Python's automatic collection, switched off while anybody is inside.

    A compile makes millions of objects that live until its end, and Python looks through them, and
    through all that torch has loaded, again and again: a tenth of the time of a large graph.
    Threads that capture at once go in and out as they like: the last one switches it on again,
    unless the first one found it off.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_on = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_on:
                gc.enable()


collected_later = _CollectedLater()
