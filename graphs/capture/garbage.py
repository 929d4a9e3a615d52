"""Cyclic garbage, which Python collects between captures and not in them."""

from __future__ import annotations

import gc
import os
import threading

__all__ = ["collected_later"]


class _CollectedLater:
    """Python's automatic collection, switched off while anybody is inside.

    A compile makes millions of objects that live until its end, and Python looks through them, and
    through all that torch has loaded, again and again.
    Threads that capture at once go in and out as they like: the last one switches it on again,
    unless the first one found it off. What others switch meanwhile does not last.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_on = gc.isenabled()
            self._inside += 1
            try:
                gc.disable()
            except BaseException:  # an interrupt
                self._leave()
                raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        self._inside -= 1
        if not self._inside and self._was_on:
            gc.enable()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    def _begin_anew(self) -> None:
        """In a forked process, which has none of the threads that were inside but its own."""
        was_off = self._inside and self._was_on
        self._forget()
        if was_off:
            gc.enable()


collected_later = _CollectedLater()
