"""The sources behind a callable: its own files, and the versions of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, TypeAlias

from graphs.files import digest_of, short_digest
from graphs.store.imports import Import, SourceFile, file_of, is_own, live_imports, read_source
from graphs.store.values import is_machinery, values_in

__all__ = ["Read", "sources_of", "version_of"]

Read: TypeAlias = Callable[[str, Path], SourceFile]

_GRAPHS = "graphs"
_EXPORTED = (
    "graphs.capture.export_state",
    "graphs.capture.inputs",
    "graphs.capture.wrappers",
)
MAKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "inductor": (
            "graphs.backends.inductor",
            "graphs.store.inductor",
            "graphs.torch_internals.artifacts",
            "graphs.torch_internals.compiling",
            "graphs.torch_internals.example_inputs",
            "graphs.torch_internals.kernel_units",
            "graphs.torch_internals.regions",
            "graphs.torch_internals.vectors",
            *_EXPORTED,
        ),
        "aoti": (
            "graphs.backends.aoti",
            "graphs.torch_internals.artifacts",
            "graphs.torch_internals.exporting",
            *_EXPORTED,
        ),
    }
)
"""The files of this package that make an artifact of a backend, and read it."""


def sources_of(
    function: Callable[..., Any], backend: str, read: Read | None = None
) -> tuple[dict[str, str], list[ModuleType]]:
    """SHA-256 of each file that a callable can reach by imports, and versions of what is installed.

    Imports anywhere in a file count, also those inside functions. What has no file, such as in an
    interactive session, is represented by its code. Of this package only what makes the artifacts
    of the backend counts, wherever it is installed: a graph has nothing else of it. `read` gives
    the source of a module and its file, by default parsed now. Returns also the modules of the
    files that are loaded.
    """
    makers = ((name, file_of(name)) for name in MAKERS.get(backend, ()))
    found = {name: _digest(file) for name, file in makers if file is not None}
    kinds = _kinds(function)
    files, packages = _reached(function, kinds, read or _parsed)
    found |= {name: _digest(file) for name in files if (file := file_of(name)) is not None}
    found |= {name: version for name in packages if (version := version_of(name))}
    for kind in kinds:
        name = kind.__module__
        if file_of(name) is None and (code := _code_of(kind)) is not None:
            found[f"{name}:{kind.__qualname__}"] = code
        elif (
            _package(name) == _GRAPHS
            and not is_machinery(name)
            and (file := file_of(name)) is not None
        ):
            found[name] = _digest(file)
    modules = [sys.modules[name] for name in files if name in sys.modules]
    return dict(sorted(found.items())), modules


def _reached(
    function: Callable[..., Any], kinds: list[Any], read: Read
) -> tuple[list[str], set[str]]:
    """The own modules that a callable can reach by imports, and the packages that it can use."""
    held = [value.__name__ for value in values_in(function) if isinstance(value, ModuleType)]
    used = [*(kind.__module__ for kind in kinds), *held]
    files: dict[str, SourceFile] = {}
    todo = [*used]
    while todo:
        name = todo.pop()
        if not name or name in files or _package(name) == _GRAPHS or not is_own(name):
            continue
        file = file_of(name)
        files[name] = read(name, file) if file else SourceFile()  # one that was removed just now
        todo += [target for each in files[name].imports for target in each.targets]
        todo += [name.rpartition(".")[0]]
    if held or any(file_of(kind.__module__) is None for kind in kinds if inspect.isfunction(kind)):
        imports: Iterable[Import] = (each for file in files.values() for each in file.imports)
    else:
        entries = {(kind.__module__, kind.__qualname__.partition(".")[0]) for kind in kinds}
        imports = live_imports(files, entries)
    used += [target for each in imports for target in each.targets]
    packages = {*map(_package, used)} - {*map(_package, files)}
    return sorted(files), packages - {_GRAPHS}


def _parsed(name: str, file: Path) -> SourceFile:
    found = file.stat()
    return read_source(name, str(file), found.st_mtime_ns, found.st_size)


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


def _package(name: str) -> str:
    return name.partition(".")[0]


@functools.lru_cache(maxsize=256)
def version_of(package: str) -> str:
    """The version of what is installed and imported by a name; empty of what is not."""
    if package in sys.stdlib_module_names:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        names = sorted(set(_distributions().get(package, ())))
    told = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return told or str(getattr(sys.modules.get(package), "__version__", ""))


@functools.lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    # Some packages are distributed by another name, as yaml is by PyYAML.
    return importlib.metadata.packages_distributions()


def _digest(file: Path) -> str:
    return digest_of(file)[:16]


def _code_of(kind: Any) -> str | None:
    functions = [kind] if inspect.isfunction(kind) else vars(kind).values()
    codes = [value.__code__ for value in functions if inspect.isfunction(value)]
    return short_digest("\n".join(map(_text_of, codes))) if codes else None


def _text_of(code: CodeType) -> str:
    constants = [_text_of(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
