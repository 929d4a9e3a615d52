"""Detects writes to any of hundreds of dictionaries, in one call of numpy.

CPython before 3.13 stores a version number in each dictionary that every change replaces; Dynamo's
guards read it too. Elsewhere every check says that something may have changed.
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
    """Versions of some dictionaries; holds references so that addresses are not reused.

    Args:
        dicts: plain dictionaries, or of a class derived from `dict`.
    """

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._dicts = [*dicts]
        self._is_known = has_versions()
        if not self._is_known or not self._dicts:
            return
        addresses = np.array([id(each) + _OFFSET for each in self._dicts], np.int64)
        start = int(addresses.min())
        words = (int(addresses.max()) - start) // _WORD + 1
        self._take = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(start)).take
        self._indices = (addresses - start) // _WORD
        self._versions = np.empty(len(addresses), np.uint64)
        self.update()

    def update(self) -> None:
        """Compare with the current versions from now on."""
        if self._is_known and self._dicts:
            self._before = self._read()

    def are_same(self) -> bool:
        """Whether no dictionary was written to; False also where that is unknown."""
        if not self._dicts:
            return True
        return self._is_known and self._read() == self._before

    def _read(self) -> bytes:
        # In mode "clip" numpy writes into `out` itself, not into a copy.
        return self._take(self._indices, out=self._versions, mode="clip").tobytes()


@functools.cache
def has_versions() -> bool:
    """Whether dictionaries have versions here; tries out each kind of change."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != _WORD:
        return False
    if hasattr(sys, "gettotalrefcount") or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False  # other layouts

    class Owner:
        pass

    owner = Owner()
    own = owner.__dict__
    versions = {_version(own)}

    def is_new() -> bool:
        count = len(versions)
        versions.add(_version(own))
        return len(versions) > count

    for value in range(64):  # until the interpreter has specialised the assignment
        owner.first = value  # type: ignore[attr-defined]
        if not is_new():
            return False
    own["first"] = owner
    replaced = is_new()
    own["second"] = 1
    added = is_new()
    del owner.first  # type: ignore[attr-defined]
    removed = is_new()
    own.update(second=2)
    return replaced and added and removed and is_new() and not is_new()


def _version(value: dict[Any, Any]) -> int:
    return ctypes.c_uint64.from_address(id(value) + _OFFSET).value
