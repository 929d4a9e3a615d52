"""A snapshot of modules, hooks and attributes, and a cheap check that it still holds.

For graphs without guards of Dynamo: loaded, exported, or traced once for several layers.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from graphs.errors import quoted

__all__ = ["DictVersions", "ModuleState", "has_versions"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_WORD = 8
_OFFSET = 3 * _WORD  # of a dictionary's version: after references, type and number of entries
_FORWARD_HOOKS = tuple(
    name for name in vars(nn.Module()) if name.endswith(("_forward_hooks", "_forward_pre_hooks"))
)
# Hooks of every module: their dictionaries are globals of torch, and never replaced.
_GLOBAL_HOOKS = {
    name: value
    for name, value in vars(sys.modules[nn.Module.__module__]).items()
    if isinstance(value, dict) and name.endswith(("_forward_hooks", "_forward_pre_hooks"))
}


class ModuleState:
    """The state of a callable's modules, apart from their tensors.

    Covers sub-modules, forward hooks (global ones too) and attributes of each module, `training`
    and a `forward` of its own among them. Plain values are compared by value, other objects by
    identity: changes inside a list or a configuration go unnoticed, as do classes and globals.
    Parameters and buffers may be replaced.

    Args:
        function: a module, a method of one, or a function that has modules in its closure.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._rows = [*_rows(function)]
        self._before = [dict(row) for _, row in self._rows]
        # Empty dictionaries of hooks are left out: every new hook takes a number.
        self._versions = DictVersions(
            row for name, row in self._rows if row or not name.endswith("_hooks")
        )
        self._handles = _handles_made()

    @classmethod
    def of(cls, function: Callable[..., Any]) -> ModuleState:
        """Return the current state; the same object as before if nothing has changed."""
        try:
            known = _known.get(function)
            if known is None or known.changed():
                known = _known[function] = cls(function)
        except TypeError:  # no hash, or no weak reference
            known = cls(function)
        return known

    def changed(self) -> str:
        """Name a change, such as "layers.3.mlp was replaced"; empty if there is none."""
        handles = _handles_made()
        if handles == self._handles and self._versions.are_same():
            return ""
        for (name, now), before in zip(self._rows, self._before, strict=True):
            if difference := _difference(name, now, before):
                return difference
        self._handles = handles
        self._versions.update()
        return ""


def _handles_made() -> int:
    return RemovableHandle.next_id


_ABSENT = object()
_known: WeakKeyDictionary[Any, ModuleState] = WeakKeyDictionary()


def _rows(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each dictionary to watch, by name: `layers.3.`, `layers.3._forward_hooks`."""
    for root, module in _modules_of(function):
        for path, part in module.named_modules(prefix=root):
            prefix = f"{path}." if path else ""
            own = part.__dict__
            yield prefix, own
            if own["_modules"]:
                yield prefix, own["_modules"]
            yield from ((prefix + hooks, own[hooks]) for hooks in _FORWARD_HOOKS if hooks in own)
    yield from _GLOBAL_HOOKS.items()


def _modules_of(function: Callable[..., Any]) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(function, nn.Module):
        yield "", function
        return
    if isinstance(function, functools.partial):
        yield from _modules_of(function.func)
        return
    if isinstance(owner := getattr(function, "__self__", None), nn.Module):
        yield "", owner
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, nn.Module):
            yield name, value
    for name in code.co_names:
        if isinstance(value := function.__globals__.get(name), nn.Module):
            yield name, value


def _difference(prefix: str, now: Mapping[Any, Any], before: Mapping[Any, Any]) -> str:
    if prefix.endswith("_hooks"):
        return _hook_difference(prefix, now, before)
    if [*now] == [*before] and all(map(is_, now.values(), before.values())):
        return ""  # the common case, in C
    for name in (*before, *(name for name in now if name not in before)):
        old, new = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if _is_same(old, new) or (_is_ignored(old) and _is_ignored(new)):
            continue
        if new is _ABSENT:
            return f"{prefix}{name} was removed"
        if old is _ABSENT:
            return f"{prefix}{name} was added"
        if isinstance(old, _PLAIN) and isinstance(new, _PLAIN):
            return f"{prefix}{name} is {quoted(new)}, was {quoted(old)}"
        return f"{prefix}{name} was replaced"
    return ""


def _hook_difference(prefix: str, now: Mapping[Any, Any], before: Mapping[Any, Any]) -> str:
    if [*now] == [*before] and all(now[key] is before[key] for key in now):
        return ""
    path, _, kind = prefix.rpartition(".")
    owner = "all modules" if prefix in _GLOBAL_HOOKS else path or "the module"
    return f"the {kind.replace('_global', '').strip('_').replace('_', ' ')} of {owner} changed"


def _is_same(old: object, new: object) -> bool:
    if old is new:
        return True
    return type(old) is type(new) and isinstance(old, _PLAIN) and bool(old == new)


def _is_ignored(value: object) -> bool:
    # Such as the manager of its graphs, which is no part of what a module computes.
    return value is _ABSENT or type(value).__module__.startswith("graphs.")


class DictVersions:
    """Detects writes to any of hundreds of dictionaries, in one call of numpy.

    CPython before 3.13 stores a version number in each dictionary that every change replaces;
    Dynamo's guards read it too. Elsewhere every check says that something may have changed.

    Args:
        dicts: plain dictionaries, or of a class derived from `dict`; their addresses stay in use.
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
