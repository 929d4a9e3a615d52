"""Modules: their source files, what these import, and the versions of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

__all__ = ["file_of", "imports_in", "is_own", "version_of"]

# Also matches imports in comments and strings, whose words rarely name a module.
_GAP = rb"(?:[ \t]|\\\r?\n)*"
_IMPORT = re.compile(
    rb"(?:from%b([.\w]+?)%bimport|import)\b%b" % (_GAP, _GAP, _GAP)
    + rb"(\((?:#[^\n]*|[\w\s,.*\\])*\)|(?:\\\r?\n|[^#\n;])*)"
)
_COMMENT = re.compile(rb"#[^\n]*")
_NAME = re.compile(rb"[\w.]+")


def file_of(name: str) -> Path | None:
    """The source file of a module, which need not be imported yet; None if it has none."""
    if name in sys.modules:
        path = getattr(sys.modules[name], "__file__", None)
        return Path(path) if path and path.endswith(".py") and os.path.isfile(path) else None
    package, _, last = name.rpartition(".")
    if not package:
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            return None
        return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
    above = file_of(package)
    if above is None or above.name != "__init__.py":
        return None
    places = (above.with_name(f"{last}.py"), above.parent / last / "__init__.py")
    return next((place for place in places if place.is_file()), None)


def is_own(name: str) -> bool:
    """Whether a module has a source file outside of Python and its installed packages."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = file_of(name)
    return file is not None and not _is_installed(str(file))


def imports_in(text: bytes, package: str) -> Iterator[str]:
    """The modules that source code in `package` may import: `from a import b` is `a` and `a.b`."""
    for base, names in _IMPORT.findall(text):
        parts = (_NAME.search(part) for part in _COMMENT.sub(b"", names).split(b","))
        found = [part[0].decode(errors="replace") for part in parts if part]
        if not base:
            yield from found
            continue
        absolute = base.decode(errors="replace").lstrip(".")
        if level := len(base) - len(base.lstrip(b".")):
            above = package.split(".")
            above = above[: len(above) - level + 1]
            absolute = ".".join([*above, *filter(None, [absolute])])
        yield absolute
        yield from (f"{absolute}.{name}" for name in found)


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
def _is_installed(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _installed_folders())


@functools.lru_cache(maxsize=1)
def _installed_folders() -> list[str]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    return [*folders, site.getusersitepackages()]  # the last is for `pip install --user`
