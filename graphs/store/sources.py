"""The sources behind a callable: its own files, and the versions of installed packages."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

__all__ = ["first_party", "sources_of"]

_ALWAYS = ("graphs.backends", "graphs.store.compiled")


def sources_of(function: Callable[..., Any]) -> dict[str, str]:
    """SHA-256 of each file that a callable can reach by imports, and versions of what is installed.

    Imports anywhere in a file count, also those inside functions. A module
    without a file, such as that of an interactive session, is told by the code of the callable.
    """
    found: dict[str, str] = {}
    for name in _imported(function):
        package = name.partition(".")[0]
        if _is_own(name) and (file := _file_of(name)) is not None:
            found[name] = _digest(file)
        elif package not in found and (version := _version(package)):
            found[package] = version
    for kind in _kinds(function):
        if _file_of(kind.__module__) is None and (code := _code_of(kind)) is not None:
            found[f"{kind.__module__}:{kind.__qualname__}"] = code
    return dict(sorted(found.items()))


def first_party(function: Callable[..., Any]) -> list[ModuleType]:
    """The loaded modules that a callable can reach, without installed packages and Python's own."""
    return [
        sys.modules[name] for name in _imported(function) if name in sys.modules and _is_own(name)
    ]


def _imported(function: Callable[..., Any]) -> list[str]:
    todo = [kind.__module__ for kind in _kinds(function)] + [*_ALWAYS]
    seen: dict[str, None] = {}
    while todo:
        name = todo.pop()
        if not name or name in seen:
            continue
        seen[name] = None
        if (file := _file_of(name)) and _is_own(name):
            found = file.stat()
            todo += _imports_of(name, str(file), found.st_mtime_ns, found.st_size)
            todo += [name.rpartition(".")[0]]
    return sorted(seen)


def _kinds(function: Callable[..., Any]) -> list[Any]:
    """The classes and functions that a callable is made of."""
    kinds: dict[Any, None] = {}
    parts = function.modules() if isinstance(function, nn.Module) else [function]
    for part in parts:
        methods = [
            value for value in getattr(part, "__dict__", {}).values() if inspect.ismethod(value)
        ]
        own = [part] if inspect.isfunction(part) or inspect.ismethod(part) else type(part).__mro__
        for kind in (*own, *(method.__func__ for method in methods)):
            if getattr(kind, "__module__", None) and hasattr(kind, "__qualname__"):
                kinds[inspect.unwrap(kind) if inspect.isfunction(kind) else kind] = None
    return list(kinds)


@functools.lru_cache(maxsize=4096)
def _imports_of(name: str, file: str, changed: int, size: int) -> tuple[str, ...]:
    tree = ast.parse(Path(file).read_bytes())
    package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
    return tuple(_imports_in(tree, package))


def _imports_in(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - max(0, node.level - 1)]
            base = ".".join([*(parts if node.level else []), *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_own(name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = _file_of(name)
    return file is not None and not any(file.is_relative_to(folder) for folder in _installed())


def _file_of(name: str) -> Path | None:
    """The source of a module, also of one in a loaded package that is not imported yet."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return Path(file) if file and file.endswith(".py") and Path(file).is_file() else None
    package, _, last = name.rpartition(".")
    above = _file_of(package) if package else None
    if above is None or above.name != "__init__.py":
        return None
    places = (above.with_name(f"{last}.py"), above.parent / last / "__init__.py")
    return next((place for place in places if place.is_file()), None)


@functools.lru_cache(maxsize=1)
def _installed() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple({Path(paths[name]) for name in ("purelib", "platlib", "stdlib", "platstdlib")})


@functools.lru_cache(maxsize=256)
def _version(package: str) -> str:
    if package in sys.stdlib_module_names:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _code_of(kind: Any) -> str | None:
    functions = [kind] if inspect.isfunction(kind) else vars(kind).values()
    codes = [value.__code__ for value in functions if inspect.isfunction(value)]
    texts = [_text_of(code) for code in codes]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] if texts else None


def _text_of(code: CodeType) -> str:
    constants = [_text_of(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
