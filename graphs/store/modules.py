"""Source files of modules: where they are, and whether they are the user's own or installed."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
from pathlib import Path

__all__ = ["file_of", "is_own"]


def is_own(name: str) -> bool:
    """Whether a module has a source file outside of Python and its installed packages."""
    if name.partition(".")[0] in sys.stdlib_module_names or _is_installed(_loaded_file(name)):
        return False
    file = file_of(name)
    return file is not None and not _is_installed(str(file))


def file_of(name: str) -> Path | None:
    """The source of a module, also of one in a loaded package that is not imported yet."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return _existing(file) if file and file.endswith(".py") else None
    package, _, last = name.rpartition(".")
    above = file_of(package) if package else None
    if above is None or above.name != "__init__.py":
        return None
    places = (above.with_name(f"{last}.py"), above.parent / last / "__init__.py")
    return next((place for place in places if place.is_file()), None)


def _loaded_file(name: str) -> str:
    """The file of a module, or of the package that it would be in; empty if none is loaded."""
    while name and name not in sys.modules:
        name = name.rpartition(".")[0]
    return getattr(sys.modules.get(name), "__file__", None) or ""


@functools.lru_cache(maxsize=8192)
def _is_installed(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _folders())


@functools.lru_cache(maxsize=1)
def _folders() -> list[str]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    return [*folders, site.getusersitepackages()]  # what `pip install --user` is for


def _existing(file: str) -> Path | None:
    path = Path(file)
    return path if path.is_file() else None
