"""Digests of the values that a graph bakes in: attributes, closures, defaults and globals."""

from __future__ import annotations

import argparse
import enum
import logging
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from graphs.files import short_digest
from graphs.lazy import is_lazy
from graphs.store.functions import code_text, function_in, functions_of, names_of
from graphs.store.modules import has_file, is_own, mentions

__all__ = ["Description", "describe", "digest_of_globals", "modules_used_by"]

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONTAINERS = (dict, tuple, list, set, frozenset)
_MAX_DEPTH = 6
_MAX_ITEMS = 1000  # a larger global container is data, not a setting
# Dictionaries of hooks and the like, which every module has and most leave empty.
_OF_ANY_MODULE = frozenset(
    name for name, part in vars(nn.Module()).items() if isinstance(part, (dict, set))
)
# Numbers in attributes with these endings differ between processes.
_PER_PROCESS = (
    "_hash",
    "_address",
    "_addresses",
    "_data_ptr",
    "_data_ptrs",
    "_pid",
    "_process_rank",
)
# Packages whose objects serve a module, hold counters and times, and are no part of its graph.
_SERVING = ("graphs.capture", "graphs.store", "graphs.warmup", "graphs.watch")
_NAMESPACES = (SimpleNamespace, MappingProxyType, argparse.Namespace)


class Description(NamedTuple):
    """What a callable is made of.

    Attributes:
        digest: of everything but the contents of tensors.
        objects: all objects in it that are not plain values, each once.
    """

    digest: str
    objects: list[Any]


def describe(function: Callable[..., Any]) -> Description:
    """Describe a module's attributes and hooks, or a function's closure and defaults.

    Left out are attributes whose names say that they are an address, a hash or a process, and the
    objects that capture and serve the module. Objects nested deeper than six levels are ignored.
    """
    describer = _Describer(with_packages=True)
    describer.add(function, "", _MAX_DEPTH)
    for name, hooks in vars(nn.modules.module).items():
        if name.endswith(("_forward_hooks", "_forward_pre_hooks")) and isinstance(hooks, dict):
            describer.add([*hooks.values()], name, _MAX_DEPTH)
    return Description(describer.digest(), describer.objects)


def digest_of_globals(module: ModuleType, *, is_known: bool = False) -> str:
    """Digest of a module's globals that its functions can use, and of its classes.

    Objects of installed packages are left out, such as loggers and locks.

    Args:
        module: its globals.
        is_known: whether :func:`modules_used_by` has just looked at it.
    """
    found = _known.get(module) if is_known else None
    found = found or _globals_of(module)
    describer = _Describer(with_packages=False)
    for name, value in found.changing:
        if _is_setting(value):
            describer.add(value, name, _MAX_DEPTH)
    return short_digest(f"{found.digest} {describer.digest()}")


def modules_used_by(module: ModuleType) -> frozenset[str]:
    """The modules of the functions and classes among a module's globals."""
    return _globals_of(module).modules


class _Globals(NamedTuple):
    """The globals of a module while the same objects are in it.

    Attributes:
        objects: all of them.
        digest: of those that cannot change themselves, and of functions and classes.
        changing: the others.
        modules: of functions and classes.
    """

    objects: list[Any]
    digest: str
    changing: list[tuple[str, Any]]
    modules: frozenset[str]


_known: WeakKeyDictionary[ModuleType, _Globals] = WeakKeyDictionary()


def _globals_of(module: ModuleType) -> _Globals:
    # A model depends on a hundred modules, and each capture looks at all of them.
    known, objects = _known.get(module), _objects_in(module)
    if known and len(known.objects) == len(objects) and all(map(is_, known.objects, objects)):
        return known
    used: set[str] | None = None
    if module.__name__ == "__main__":
        used = set().union(*(names_of(each.__code__) for each in functions_of(module)))
    describer = _Describer(with_packages=False)
    changing: list[tuple[str, Any]] = []
    modules: set[str] = set()
    for name, value in sorted(vars(module).items()):
        if name.startswith("__") or not (used is None or name in used):
            continue
        if is_lazy(module.__name__, name, value):  # which code has used it so far is by chance
            continue
        if isinstance(value, type):
            # A class counts in the module that defines it, elsewhere by its name.
            is_here = value.__module__ == module.__name__
            describer.add(value, name, _MAX_DEPTH if is_here else -1)
            modules.add(str(value.__module__))
            inner = vars(value).items() if is_here else ()
            changing += [
                (f"{name}.{attribute}", part)
                for attribute, part in inner
                if isinstance(part, _CONTAINERS) and not attribute.startswith("__")
            ]
        elif isinstance(value, (FunctionType, BuiltinFunctionType, *_PLAIN)):
            describer.add(value, name, _MAX_DEPTH)
            if isinstance(value, FunctionType):
                modules.add(str(value.__globals__.get("__name__")))
        else:
            changing.append((name, value))
    _known[module] = _Globals(objects, describer.digest(), changing, frozenset(modules))
    return _known[module]


def _objects_in(module: ModuleType) -> list[Any]:
    """Everything that is another object after a change, of functions and classes too."""
    objects = [*vars(module), *vars(module).values()]
    for value in objects[len(objects) // 2 :]:
        if isinstance(value, type) and value.__module__ == module.__name__:
            objects += vars(value).values()
    functions = [each for each in objects if isinstance(each, FunctionType)]
    return [*objects, *(each.__defaults__ for each in functions)]


def _is_setting(value: Any, depth: int = _MAX_DEPTH) -> bool:
    if isinstance(value, _PLAIN):
        return True
    # os.environ is a mapping but no dict, and so is left out.
    if isinstance(value, _CONTAINERS):
        inner = (*value, *value.values()) if isinstance(value, dict) else value
        return (
            depth > 0 and len(value) <= _MAX_ITEMS and all(_is_setting(v, depth - 1) for v in inner)
        )
    if isinstance(value, (FunctionType, BuiltinFunctionType, partial, nn.Module, type)):
        return True
    module = str(type(value).__module__)
    return isinstance(value, _NAMESPACES) or (is_own(module) and not module.startswith("graphs."))


class _Seen(NamedTuple):
    value: Any  # so that its id stays unique
    path: str
    depth: int


class _Describer:
    """Appends lines that describe values, each object once; later it is named by its first path.

    Args:
        with_packages: whether to look for functions that were replaced in classes of packages.
    """

    def __init__(self, *, with_packages: bool) -> None:
        self._with_packages = with_packages
        self._lines: list[str] = []
        self._seen: dict[int, _Seen] = {}

    @property
    def objects(self) -> list[Any]:
        return [seen.value for seen in self._seen.values()]

    def digest(self) -> str:
        return short_digest("".join(f"{line}\n" for line in self._lines))

    def add(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._lines.append(f"{path}={value!r}")
            return
        seen = self._seen.get(id(value))
        if seen and seen.depth >= depth:
            self._lines.append(f"{path}: as {seen.path}")
            return
        self._lines.append(f"{path}: {_name_of(value)}")
        if depth < 0:
            return
        self._seen[id(value)] = _Seen(value, seen.path if seen else path, depth)
        if isinstance(value, (set, frozenset)):
            self._add_members(value, f"{path}.member", depth - 1)
        for name, part in _parts(value, self._with_packages):
            is_plain = isinstance(part, (bool, str, FunctionType))
            if is_plain or not f"_{name}".endswith(_PER_PROCESS):
                self.add(part, f"{path}.{name}", _MAX_DEPTH if _nests(part) else depth - 1)

    def _add_members(self, members: Any, path: str, depth: int) -> None:
        texts = []
        before, self._lines = self._lines, []
        for member in members:
            self._lines = []
            self.add(member, path, depth)
            texts.append("\n".join(self._lines))
        self._lines = [*before, *sorted(texts)]


def _nests(value: Any) -> bool:
    """Whether it may be nested without limit: modules, and code that has no file."""
    is_code = isinstance(value, (FunctionType, type)) and not has_file(str(value.__module__))
    return is_code or isinstance(value, nn.Module)


def _name_of(value: Any) -> str:
    if isinstance(value, Tensor):
        layout = f"{value.dtype} {value.device} {value.layout}"
        stride = value.stride() if value.layout is torch.strided else ""
        return f"{type(value).__qualname__} {tuple(value.shape)} {stride} {layout}"
    if isinstance(value, FunctionType):
        code = value.__code__
        return f"{value.__globals__.get('__name__')}.{code.co_qualname}:{code.co_firstlineno}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} {value.shape} {value if isinstance(value, np.generic) else ''}"
    if isinstance(value, (range, slice)):
        return repr(value)
    if isinstance(value, (type, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, ModuleType):
        return value.__name__
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _parts(value: Any, with_packages: bool) -> list[tuple[str, Any]]:
    kind = type(value)
    if isinstance(value, type):
        return _parts_of_class(value, with_packages)
    if isinstance(value, (Tensor, ModuleType, logging.Logger)) or kind.__module__.startswith(
        _SERVING
    ):
        return []
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        for place, (key, part) in enumerate([*value.items()]):
            if isinstance(key, _PLAIN):
                parts.append((repr(key), part))
            else:
                parts += [(f"key {place}", key), (f"value {place}", part)]
    elif isinstance(value, (list, tuple)):
        parts = [(str(place), part) for place, part in enumerate(value)]
    if kind in _CONTAINERS:
        return parts
    own = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        own = {name: part for name, part in own.items() if name not in _OF_ANY_MODULE or part}
        # Hooks are numbered by the process.
        own |= {name: [*own[name].values()] for name in own if name.endswith("_hooks")}
    return [*parts, *sorted({**_slot_values(value), **own}.items()), ("class", kind)]


def _slot_values(value: Any) -> dict[str, Any]:
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _parts_of_class(kind: type, with_packages: bool) -> list[tuple[str, Any]]:
    """Bases, settings, and functions; of a class with a file those that were put in its place."""
    module = str(kind.__module__)
    package, is_typed_in = module.partition(".")[0], not has_file(module)
    is_whole = is_typed_in or is_own(module)
    if package in ("builtins", "graphs") or not (is_whole or with_packages):
        return []
    parts: list[tuple[str, Any]] = [(f"base {i}", base) for i, base in enumerate(kind.__bases__)]
    for name, value in [*vars(kind).items()]:
        function = function_in(value)
        if function is None:
            if is_whole and not name.startswith("__") and _is_setting(value):
                parts.append((name, value))
        elif not is_typed_in and name.startswith("__") and _is_generated(function):
            continue
        elif is_whole or _is_put_in(function, name, module):
            parts.append((name, function))
    return parts


def _parts_of_function(function: FunctionType) -> list[tuple[str, Any]]:
    """Defaults; of a function inside another one, or without a file, also code, cells, globals."""
    code = function.__code__
    defaults = ("defaults", function.__defaults__), ("keywords", function.__kwdefaults__)
    parts: list[tuple[str, Any]] = [each for each in defaults if each[1]]
    is_written = has_file(str(function.__globals__.get("__name__")))
    if is_written and "<" not in code.co_qualname:
        return parts
    parts += [("code", code_text(code)), ("wrapped", getattr(function, "__wrapped__", None))]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            parts.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            parts.append((name, None))
    found = function.__globals__
    used = ((name, found[name]) for name in sorted(names_of(code)) if name in found)
    return parts + [(n, v) for n, v in used if not is_written or isinstance(v, _PLAIN)]


def _is_generated(function: FunctionType) -> bool:
    return function.__code__.co_filename == "<string>"  # as of dataclasses


def _is_put_in(function: FunctionType, name: str, module: str) -> bool:
    """Whether a function in a package's class is of own code, or replaces one of the class.

    A method that another package adds is called only by code that needs that package.
    """
    home = str(function.__globals__.get("__name__", ""))
    if home.partition(".")[0] == module.partition(".")[0]:
        return False
    return not has_file(home) or is_own(home) or mentions(module, name)
