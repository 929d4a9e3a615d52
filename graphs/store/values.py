"""A digest of the values that a graph has baked in: attributes, closures and globals."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from graphs.store.sources import first_party

__all__ = ["digest_of_globals", "digest_of_values"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 6
# By these names go numbers that are others in each process.
_OF_A_PROCESS = ("_hash", "address", "addresses", "data_ptr", "data_ptrs", "pid")
# What captures and serves a module may hang from it, with counters and seconds.
_MACHINERY = (
    "graphs.capture",
    "graphs.compiles",
    "graphs.journal",
    "graphs.sentinel",
    "graphs.store",
    "graphs.warmup",
)


def digest_of_values(function: Callable[..., Any]) -> str:
    """Digest of all but tensors in a module's attributes, a function's closure and defaults.

    Plain values, and containers and objects of them; not what an attribute's name tells to be an
    address, a hash or a process, nor what captures and serves the module. Two callables with the
    same digest may differ in an object that nests deeper than six levels.
    """
    return _digest(_of(function, "", _DEPTH, set()))


def digest_of_globals(function: Callable[..., Any]) -> str:
    """Digest of the plain values among the globals of the files that a callable can reach."""
    lines = (
        line
        for module in first_party(function)
        if not module.__name__.startswith("graphs.")  # its own counters are no part of a graph
        for name, value in sorted(vars(module).items())
        if not name.startswith("__") and _is_plain(value)
        for line in _of(value, f"{module.__name__}.{name}", 2, set())
    )
    return _digest(lines)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (enum.Enum, *_PLAIN))


def _digest(lines: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="replace") + b"\n")
    return digest.hexdigest()[:16]


def _of(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[str]:
    if isinstance(value, (enum.Enum, *_PLAIN)):
        yield f"{path}={value!r}"
        return
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Tensor):
        yield f"{path}: {kind}"
        return
    if id(value) in seen or depth < 0 or isinstance(value, (ModuleType, type)):
        yield f"{path}: {getattr(value, '__qualname__', kind)}"
        return
    seen.add(id(value))
    yield f"{path}: {kind}"
    if type(value).__module__.startswith(_MACHINERY):
        return
    for name, part in _parts(value):
        if name.endswith(_OF_A_PROCESS):
            continue
        # Modules nest as deep as they like; what they hold does not.
        left = _DEPTH if isinstance(part, nn.Module) else depth - 1
        yield from _of(part, f"{path}.{name}", left, seen)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return sorted(((repr(key), part) for key, part in value.items()), key=lambda pair: pair[0])
    if isinstance(value, (list, tuple)):
        return [(str(i), part) for i, part in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [("set", sorted(map(repr, value)))]
    if inspect.ismethod(value):
        return [("self", value.__self__), ("func", value.__func__)]
    if inspect.isfunction(value):
        return _of_function(value)
    if dataclasses.is_dataclass(value):
        return [
            (field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)
        ]
    return sorted(getattr(value, "__dict__", {}).items())


def _of_function(value: Any) -> list[tuple[str, Any]]:
    names = value.__code__.co_freevars
    cells = []
    for name, cell in zip(names, value.__closure__ or (), strict=True):
        try:
            cells.append((name, cell.cell_contents))
        except ValueError:  # not filled yet
            cells.append((name, None))
    own = {n: value.__globals__[n] for n in value.__code__.co_names if n in value.__globals__}
    plain = [(n, v) for n, v in own.items() if _is_plain(v)]
    return [("name", value.__qualname__), ("defaults", value.__defaults__), *cells, *plain]
