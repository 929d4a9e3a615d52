"""Replaces attributes of torch inside a `with` statement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

__all__ = ["Patch", "SharedPatch"]


class Patch(NamedTuple):
    """An attribute `name` of a module or class `owner`, and its replacement `value`."""

    owner: Any
    name: str
    value: Any


class SharedPatch:
    """Replaces attributes while any thread is inside.

    The first thread to enter replaces them, the last one to leave restores them. Replacements must
    not affect threads outside.

    Args:
        make: returns the replacements; called by the first thread.
    """

    def __init__(self, make: Callable[[], Sequence[Patch]]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._inside = 0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        with self._lock:
            if not self._inside:
                try:
                    for patch in self._make():
                        undo = _restore(patch)
                        setattr(*patch)
                        self._undo.append(undo)
                except BaseException:
                    self._restore()
                    raise
            self._inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore()

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def _restore(patch: Patch) -> Callable[[], None]:
    owner, name, _ = patch
    own = getattr(owner, "__dict__", {})
    if name in own:  # the stored object, such as a staticmethod, not what getattr returns
        before = own[name]
        return lambda: setattr(owner, name, before)
    return lambda: delattr(owner, name)
