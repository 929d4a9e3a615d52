"""Source files that a graph depends on, by SHA-256, and the versions of installed packages.

Conservative: the whole file of every module that the callable's classes and functions come from,
and of all that these files import, at the top or inside a function; of what is installed, the
version of each package that they name. Installing a package that no file names changes nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from graphs.store.modules import file_of, imports_in, is_own, loaded, version_of
from graphs.store.values import code_of, modules_used_by

__all__ = ["sources_of"]

_GRAPHS = "graphs"


def sources_of(objects: Iterable[Any]) -> tuple[dict[str, str], list[str]]:
    """Digests of the source files behind objects, versions of packages, and names of modules.

    Code without a file, such as that of an interactive session, is described with its values. This
    package counts as one digest of all its files, as any of them may make the artifact.
    """
    names = frozenset(name for value in objects for name in _modules_of(value))
    files, packages = _reachable(names)
    found = {_GRAPHS: _own_digest()} | files
    found |= {name: version for name in packages if (version := version_of(name))}
    return dict(sorted(found.items())), sorted(files)


def _modules_of(value: Any) -> Iterable[str]:
    """The modules that the code of an object comes from."""
    if isinstance(value, ModuleType):
        return [value.__name__]
    if isinstance(value, FunctionType):
        names = [value.__module__, value.__globals__.get("__name__")]
    else:
        names = [
            each.__module__ for each in (value if isinstance(value, type) else type(value)).__mro__
        ]
    return [name for name in names if name]


class _Reached(NamedTuple):
    """What modules can reach by imports: own files with their time and size, other packages."""

    files: dict[str, tuple[Path, str, int, int]]
    packages: frozenset[str]


def _reachable(names: frozenset[str]) -> tuple[dict[str, str], frozenset[str]]:
    """Digests of the own files that modules can reach by imports, and all other packages."""
    reached, every = _reach(names), names
    checked: set[str] = set()
    while fresh := reached.files.keys() - checked:
        checked |= fresh
        # Another function or class may have been put in the place of one of a module's own.
        every = every.union(*map(modules_used_by, loaded(fresh).values()))
        reached = _reach(every)
    if any(_changed(name, *found) for name, found in reached.files.items()):
        _reach.cache_clear()
        return _reachable(names)
    digests = {}
    for name, (_, digest, time_ns, _) in reached.files.items():
        if time_ns > _STARTED and (module := loaded([name])):  # perhaps edited after its import
            digest += f" loaded as {code_of(module[name])}"
        digests[name] = digest
    return digests, reached.packages


@functools.lru_cache(maxsize=64)
def _reach(names: frozenset[str]) -> _Reached:
    files: dict[str, tuple[Path, str, int, int]] = {}
    packages: set[str] = set()
    seen, todo = {""}, [*names]
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
            digest, imports = _read(file, inside, found.st_ctime_ns, found.st_size)
        except OSError:  # it was removed just now
            continue
        files[name] = file, digest, found.st_ctime_ns, found.st_size
        todo += [above, *imports]
    own = {_GRAPHS, *(name.partition(".")[0] for name in files)}
    return _Reached(files, frozenset(packages - own))


def _changed(name: str, file: Path, _: str, time_ns: int, size: int) -> bool:
    if file_of(name) != file:
        return True
    try:
        found = os.stat(file)
    except OSError:
        return True
    return (found.st_ctime_ns, found.st_size) != (time_ns, size)


def _start_of_process() -> int:
    """When this process was started, in nanoseconds since the epoch; else now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, LookupError, AttributeError):  # not Linux
        return time.time_ns()
    return time.time_ns() - int((age + 1.0) * 1e9)  # clocks of file systems are coarse


_STARTED = _start_of_process()


@functools.lru_cache(maxsize=4096)
def _read(file: Path, package: str, *_: int) -> tuple[str, tuple[str, ...]]:
    # The time of change and the size distinguish versions of a file in the cache.
    text = file.read_bytes()
    return hashlib.sha256(text).hexdigest()[:16], tuple(dict.fromkeys(imports_in(text, package)))


@functools.lru_cache(maxsize=1)
def _own_digest() -> str:
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()[:16]
