"""Source files that a graph depends on, by SHA-256, and the versions of installed packages.

Conservative: the whole file of every module that the callable's classes and functions come from,
and of all that these files import, at the top or inside a function; of what is installed, the
version of each package that they name. Installing a package that no file names changes nothing.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from graphs.files import short_digest
from graphs.store.modules import file_of, imports_in, is_own, version_of
from graphs.store.values import values_in

__all__ = ["sources_of"]

_GRAPHS = "graphs"


def sources_of(function: Callable[..., Any]) -> tuple[dict[str, str], list[ModuleType]]:
    """Digests of the source files behind a callable, versions of packages, and loaded modules.

    What has no file, such as code of an interactive session, is represented by its bytecode. This
    package counts as one digest of all its files, as any of them may make the artifact.
    """
    kinds = _kinds(function)
    held = [value.__name__ for value in values_in(function) if isinstance(value, ModuleType)]
    files, packages = _reachable([*(kind.__module__ for kind in kinds), *held])
    found = {_GRAPHS: _own_digest()} | files
    found |= {name: version for name in packages if (version := version_of(name))}
    for kind in kinds:
        if file_of(kind.__module__) is None and (code := _code_digest(kind)) is not None:
            found[f"{kind.__module__}:{kind.__qualname__}"] = code
    modules = [sys.modules[name] for name in sorted(files) if name in sys.modules]
    return dict(sorted(found.items())), modules


def _reachable(todo: list[str]) -> tuple[dict[str, str], set[str]]:
    """Digests of the own files that modules can reach by imports, and all other packages."""
    files: dict[str, str] = {}
    packages: set[str] = set()
    seen = {""}
    while todo:
        if (name := todo.pop()) in seen:
            continue
        seen.add(name)
        package = name.partition(".")[0]
        if package == _GRAPHS or not is_own(name) or not (file := file_of(name)):
            packages.add(package)
            continue
        above = name.rpartition(".")[0]
        if name == "__main__":  # of `python -m package.module`
            above = getattr(sys.modules[name], "__package__", None) or ""
        try:
            found = file.stat()
            inside = name if file.name == "__init__.py" else above
            files[name], imports = _read(file, inside, found.st_mtime_ns, found.st_size)
        except OSError:  # it was removed just now
            continue
        todo += [above, *imports]
    return files, packages - {_GRAPHS, *(name.partition(".")[0] for name in files)}


@functools.lru_cache(maxsize=4096)
def _read(file: Path, package: str, *_: int) -> tuple[str, tuple[str, ...]]:
    # The time of change and the size distinguish versions of a file in the cache.
    text = file.read_bytes()
    return hashlib.sha256(text).hexdigest()[:16], tuple(dict.fromkeys(imports_in(text, package)))


def _kinds(function: Callable[..., Any]) -> list[Any]:
    """The classes and functions that a callable is made of and holds."""
    kinds: dict[Any, None] = {}
    for value in values_in(function):
        if isinstance(value, ModuleType):
            continue
        if inspect.isfunction(value):
            kinds[value] = None
        else:
            kinds |= dict.fromkeys((value if isinstance(value, type) else type(value)).__mro__)
    return [kind for kind in kinds if getattr(kind, "__module__", None)]


@functools.lru_cache(maxsize=1)
def _own_digest() -> str:
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()[:16]


def _code_digest(kind: Any) -> str | None:
    functions = [kind] if inspect.isfunction(kind) else vars(kind).values()
    codes = [value.__code__ for value in functions if inspect.isfunction(value)]
    return short_digest("\n".join(map(_code_text, codes))) if codes else None


def _code_text(code: CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
