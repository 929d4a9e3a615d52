"""Modules: their source files, and the versions of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

__all__ = ["file_of", "has_file", "is_own", "loaded", "mentions", "version_of"]


def file_of(name: str) -> Path | None:
    """The source file of a module, which need not be imported yet; None if it has none."""
    if name in sys.modules:
        path = getattr(sys.modules[name], "__file__", None)
        return Path(path) if path and path.endswith(".py") and os.path.isfile(path) else None
    package, _, last = name.rpartition(".")
    if not package:
        spec = _spec_of(name)
        return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
    folders = [Path(folder, last) for folder in _folders_of(package)]
    files = (file for each in folders for file in (each / "__init__.py", Path(f"{each}.py")))
    return next((file for file in files if file.is_file()), None)


def _folders_of(package: str) -> list[str]:
    """Where the modules of a package are, which may be a namespace of several folders."""
    if package in sys.modules:
        return [*getattr(sys.modules[package], "__path__", ())]
    above, _, last = package.rpartition(".")
    if not above:
        spec = _spec_of(package)
        return [*(spec.submodule_search_locations or ())] if spec else []
    folders = (os.path.join(folder, last) for folder in _folders_of(above))
    return [folder for folder in folders if os.path.isdir(folder)]


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except (ImportError, ValueError):
        return None


def loaded(names: Iterable[str]) -> dict[str, ModuleType]:
    """Those of some modules that are imported already, by name."""
    found = ((name, sys.modules.get(name)) for name in names)
    return {name: module for name, module in found if isinstance(module, ModuleType)}


def has_file(name: str) -> bool:
    """Whether a module has a source file."""
    path = getattr(sys.modules[name], "__file__", None) if name in sys.modules else file_of(name)
    return path is not None and _is_source(str(path))


def is_own(name: str) -> bool:
    """Whether a module has a source file outside of Python and its installed packages."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules[name], "__file__", None) if name in sys.modules else file_of(name)
    return file is not None and _is_source(str(file)) and not _is_installed(str(file))


@functools.lru_cache(maxsize=1024)
def mentions(module: str, name: str) -> bool:
    """Whether the source file of a module contains a name; True if it has no file."""
    file = file_of(module)
    return file is None or name.encode() in file.read_bytes()


@functools.lru_cache(maxsize=256)
def version_of(package: str) -> str:
    """The version of an installed package by its import name; empty if there is none."""
    if package in sys.stdlib_module_names:
        return ""
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        if package not in sys.modules and file_of(package) is None:
            return ""
    names = sorted(set(_distributions().get(package, ())))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return versions or str(getattr(sys.modules.get(package), "__version__", ""))


@functools.lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    # Some packages are distributed under another name, as yaml is by PyYAML.
    return importlib.metadata.packages_distributions()


@functools.lru_cache(maxsize=8192)
def _is_source(file: str) -> bool:
    return file.endswith(".py") and os.path.isfile(file)


@functools.lru_cache(maxsize=8192)
def _is_installed(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _installed_folders())


@functools.lru_cache(maxsize=1)
def _installed_folders() -> list[str]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    return [*folders, site.getusersitepackages()]  # the last is for `pip install --user`
