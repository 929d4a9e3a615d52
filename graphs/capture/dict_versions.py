"""Versions of dictionaries: whether any of hundreds was written to, in one call of numpy.

CPython keeps a number in each dictionary that every change replaces, until 3.13; Dynamo's guards
read it too. Where it is not there, every check says that something may have changed.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["DictVersions", "has_versions"]

_WORD = 8
_OFFSET = 3 * _WORD  # after the reference count, the type and the number of entries


class DictVersions:
    """The versions of some dictionaries, which it keeps alive.

    Args:
        dicts: plain dictionaries, or of a class derived from `dict`.
    """

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._dicts = [*dicts]  # or else their addresses could become those of others
        self._is_known = has_versions()
        if not self._is_known or not self._dicts:
            return
        addresses = np.array([id(each) + _OFFSET for each in self._dicts], np.int64)
        start = int(addresses.min())
        words = (int(addresses.max()) - start) // _WORD + 1
        self._take = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(start)).take
        self._places = (addresses - start) // _WORD
        self._versions = np.empty(len(addresses), np.uint64)
        self.update()

    def update(self) -> None:
        """Takes the versions as they are now for those to compare with."""
        if self._is_known and self._dicts:
            self._before = self._read()

    def are_same(self) -> bool:
        """Whether no dictionary was written to; False also where that cannot be known."""
        if not self._dicts:
            return True
        return self._is_known and self._read() == self._before

    def _read(self) -> bytes:
        # In mode "clip" numpy writes into `out` itself, not into a copy.
        return self._take(self._places, out=self._versions, mode="clip").tobytes()


@functools.cache
def has_versions() -> bool:
    """Whether dictionaries have versions here, found by changing some in each way."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return False
    if hasattr(sys, "gettotalrefcount") or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False  # other layouts

    class Owner:
        pass

    owner = Owner()
    own = owner.__dict__
    seen = {_version(own)}

    def sees() -> bool:
        count = len(seen)
        seen.add(_version(own))
        return len(seen) > count

    for value in range(64):  # until the interpreter has specialised the assignment
        owner.first = value  # type: ignore[attr-defined]
        if not sees():
            return False
    own["first"] = owner
    replaced = sees()
    own["second"] = 1
    added = sees()
    del owner.first  # type: ignore[attr-defined]
    removed = sees()
    own.update(second=2)
    updated = sees()
    return replaced and added and removed and updated and not sees()


def _version(value: dict[Any, Any]) -> int:
    return ctypes.c_uint64.from_address(id(value) + _OFFSET).value
