"""The sources behind a callable: its own files, and the versions of installed packages."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from graphs.store.modules import file_of, is_own
from graphs.store.values import values_in

__all__ = ["sources_of"]

_ALWAYS = ("graphs.backends", "graphs.store.compiled")


def sources_of(function: Callable[..., Any]) -> tuple[dict[str, str], list[ModuleType]]:
    """SHA-256 of each file that a callable can reach by imports, and versions of what is installed.

    Imports anywhere in a file count, also those inside functions. What has no file, such as in an
    interactive session, is told by its code. Returns also the modules of the files that are loaded.
    """
    found: dict[str, str] = {}
    modules: list[ModuleType] = []
    for name in _imported(function):
        package = name.partition(".")[0]
        if is_own(name) and (file := file_of(name)) is not None:
            found[name] = _digest(file)
            modules += [sys.modules[name]] if name in sys.modules else []
        elif package not in found and (version := _version(package)):
            found[package] = version
    for kind in _kinds(function):
        if file_of(kind.__module__) is None and (code := _code_of(kind)) is not None:
            found[f"{kind.__module__}:{kind.__qualname__}"] = code
    return dict(sorted(found.items())), modules


def _imported(function: Callable[..., Any]) -> list[str]:
    modules = [value.__name__ for value in values_in(function) if isinstance(value, ModuleType)]
    todo = [kind.__module__ for kind in _kinds(function)] + modules + [*_ALWAYS]
    seen: dict[str, None] = {}
    while todo:
        name = todo.pop()
        if not name or name in seen:
            continue
        seen[name] = None
        if (file := file_of(name)) and is_own(name):
            found = file.stat()
            todo += _imports_of(name, str(file), found.st_mtime_ns, found.st_size)
            todo += [name.rpartition(".")[0]]
    return sorted(seen)


def _kinds(function: Callable[..., Any]) -> list[Any]:
    """The classes and functions that a callable is made of and holds on to."""
    kinds: dict[Any, None] = {}
    for value in values_in(function):
        if isinstance(value, ModuleType):
            continue
        if inspect.isfunction(value):
            kinds[value] = None
        else:
            kinds |= dict.fromkeys((value if isinstance(value, type) else type(value)).__mro__)
    return [kind for kind in kinds if getattr(kind, "__module__", None)]


@functools.lru_cache(maxsize=4096)
def _imports_of(name: str, file: str, changed: int, size: int) -> tuple[str, ...]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError):  # for another Python: this one cannot import it
        return ()
    package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
    return tuple(_imports_in(tree, package))


def _imports_in(tree: ast.AST, package: str) -> Iterator[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - max(0, node.level - 1)]
            base = ".".join([*(parts if node.level else []), *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    # Without expressions, in which nothing is imported: they are most of a tree.
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, ())
            todo += inner if isinstance(inner, list) else ()


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
