"""Digests of the values that a graph bakes in: attributes, closures and globals."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from graphs.files import short_digest
from graphs.store.modules import file_of, is_own

__all__ = ["digest_of_globals", "digest_of_values", "values_in"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 6
_MAX_ITEMS = 1000  # a larger global container is data, not a setting
# Dictionaries of hooks and the like, which every module has and most leave empty.
_OF_ANY_MODULE = frozenset(
    name for name, part in vars(nn.Module()).items() if isinstance(part, (dict, set))
)
# Attributes with these endings differ between processes.
_PER_PROCESS = ("_hash", "address", "addresses", "data_ptr", "data_ptrs", "pid", "process_rank")
# Packages whose objects serve a module, hold counters and times, and are no part of its graph.
_SERVING = ("graphs.capture", "graphs.store", "graphs.warmup", "graphs.watch")


def digest_of_values(function: Callable[..., Any]) -> str:
    """Digest of everything but tensors in a module's attributes, a function's closure and defaults.

    Left out are attributes whose names say that they are an address, a hash or a process, and the
    objects that capture and serve the module. Objects nested deeper than six levels are ignored.
    """
    lines: list[str] = []
    _Describer(lines).add(function, "", _MAX_DEPTH)
    return _digest(lines)


def digest_of_globals(modules: list[ModuleType]) -> str:
    """Digest of the plain values, and containers of them, among the globals of modules."""
    lines: list[str] = []
    for module in modules:
        for name, value in sorted(vars(module).items()):
            if not name.startswith("__") and _is_plain(value):
                _Describer(lines).add(value, f"{module.__name__}.{name}", _MAX_DEPTH)
    return _digest(lines)


def values_in(function: Callable[..., Any]) -> Iterator[Any]:
    """A callable and everything that it holds except plain values, each object once."""
    seen: dict[int, Any] = {}
    todo: list[tuple[Any, int]] = [(function, _MAX_DEPTH)]
    while todo:
        value, depth = todo.pop()
        if id(value) in seen or depth < 0 or isinstance(value, (Tensor, enum.Enum, *_PLAIN)):
            continue
        seen[id(value)] = value
        yield value
        if not _is_leaf(value):
            left = _MAX_DEPTH if isinstance(value, nn.Module) else depth - 1
            todo += [(part, left) for _, part in _parts(value)]


def _is_leaf(value: Any) -> bool:
    return type(value).__module__.startswith(_SERVING) or isinstance(value, (ModuleType, type))


def _is_plain(value: Any, depth: int = _MAX_DEPTH) -> bool:
    # os.environ is a mapping but no dict, and so is left out.
    if isinstance(value, (dict, tuple, list, set, frozenset)):
        inner = (*value, *value.values()) if isinstance(value, dict) else value
        return (
            depth > 0 and len(value) <= _MAX_ITEMS and all(_is_plain(v, depth - 1) for v in inner)
        )
    return isinstance(value, (enum.Enum, *_PLAIN))


def _digest(lines: list[str]) -> str:
    return short_digest("".join(f"{line}\n" for line in lines))


class _Describer:
    """Appends lines that describe values, each object once."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._seen: dict[int, Any] = {}  # holds the objects, so that their ids stay unique
        self._class_values: dict[type, dict[str, Any]] = {}

    def add(self, value: Any, path: str, depth: int) -> None:
        kind = type(value)
        if isinstance(value, (enum.Enum, *_PLAIN)):
            self._lines.append(f"{path}={value!r}")
            return
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, Tensor):
            self._lines.append(f"{path}: {name}")
            return
        if id(value) in self._seen or depth < 0 or isinstance(value, (ModuleType, type)):
            self._lines.append(f"{path}: {getattr(value, '__qualname__', name)}")
            return
        self._seen[id(value)] = value
        self._lines.append(f"{path}: {name}")
        if _is_leaf(value):
            return
        for attribute, part in _parts(value, self._values_of_class):
            if not attribute.endswith(_PER_PROCESS):
                # Modules may nest without limit, other objects may not.
                left = _MAX_DEPTH if isinstance(part, nn.Module) else depth - 1
                self.add(part, f"{path}.{attribute}", left)

    def _values_of_class(self, kind: type) -> dict[str, Any]:
        if kind not in self._class_values:
            self._class_values[kind] = _class_values(kind)
        return self._class_values[kind]


def _parts(
    value: Any, of_class: Callable[[type], Mapping[str, Any]] | None = None
) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return sorted(((repr(key), part) for key, part in value.items()), key=lambda pair: pair[0])
    if isinstance(value, (list, tuple)):
        return [(str(i), part) for i, part in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [("set", sorted(map(repr, value)))]
    if inspect.ismethod(value):
        return [("self", value.__self__), ("func", value.__func__)]
    if inspect.isfunction(value):
        return _function_parts(value)
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if dataclasses.is_dataclass(value):
        return [
            (field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)
        ]
    kind, own = type(value), getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        own = {name: part for name, part in own.items() if name not in _OF_ANY_MODULE or part}
    return sorted({**(of_class or _class_values)(kind), **_slot_values(value), **own}.items())


def _class_values(kind: type) -> dict[str, Any]:
    return {
        name: value
        for each in reversed(kind.__mro__)
        if is_own(each.__module__) or file_of(each.__module__) is None
        for name, value in vars(each).items()
        if not name.startswith("_") and _is_plain(value)
    }


def _slot_values(value: Any) -> dict[str, Any]:
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _function_parts(value: Any) -> list[tuple[str, Any]]:
    names = value.__code__.co_freevars
    cells = []
    for name, cell in zip(names, value.__closure__ or (), strict=True):
        try:
            cells.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            cells.append((name, None))
    used = {n: value.__globals__[n] for n in _names_of(value.__code__) if n in value.__globals__}
    return [
        ("name", value.__qualname__),
        ("defaults", value.__defaults__),
        ("keyword defaults", value.__kwdefaults__),
        ("wrapped", getattr(value, "__wrapped__", None)),
        *cells,
        *((n, v) for n, v in sorted(used.items()) if _is_plain(v) or _is_interactive(v)),
    ]


def _names_of(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names_of, inner))


def _is_interactive(value: Any) -> bool:
    # Code of an interactive session has no file whose digest would cover it.
    if isinstance(value, ModuleType):
        return True
    is_code = inspect.isfunction(value) or isinstance(value, (type, partial))
    return is_code and file_of(getattr(value, "__module__", "")) is None
