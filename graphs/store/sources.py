"""Source files and globals that a graph depends on, and the versions of installed packages.

Conservative: the whole file of every module that the callable's classes and functions come from,
and of all that these files import, at the top or inside a function, but not for type checkers; of
what is installed, the version of each package that they name. Installing a package that no file
names changes nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from graphs.files import short_digest
from graphs.store.functions import code_of, is_code_of
from graphs.store.imports import WHOLE, Imports, imports_in
from graphs.store.modules import file_of, is_own, loaded, version_of
from graphs.store.values import digest_of_globals, modules_used_by

__all__ = ["CodeDigests"]

_GRAPHS = "graphs"


class CodeDigests:
    """Digests of source files, versions of packages and globals of modules.

    Globals that captures change or import themselves do not count, since they are not changed where
    the graphs are loaded.
    """

    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        self._before: dict[tuple[str, str], str] = {}
        self._known: dict[frozenset[str], tuple[dict[str, str], str]] | None = None

    @contextmanager
    def reading_once(self) -> Iterator[None]:
        """Read each module once within the block, whatever changes there."""
        if self._known is not None:  # within another block
            yield
            return
        self._known, self._last = {}, {}
        try:
            yield
        finally:
            self._known = None
            self.ignore_changes()

    def read(self, objects: Iterable[Any]) -> tuple[dict[str, str], str]:
        """Digests and versions of what the code of objects comes from, and a digest of its globals.

        Code without a file, such as that of an interactive session, is described with its values.
        This package counts as one digest of all its files, as any of them may make the artifact.
        """
        names = frozenset(name for value in objects for name in _modules_of(value))
        if self._known is None:
            return self._read(names)
        if names not in self._known:
            self._ignore_changes()  # by captures in this block
            self._known[names] = self._read(names)
        return self._known[names]

    def ignore_changes(self) -> None:
        """Ignore what has changed since the last call of `read`; waits for the end of a block."""
        if self._known is None:
            self._ignore_changes()

    def _read(self, names: frozenset[str]) -> tuple[dict[str, str], str]:
        files, packages = _reachable(names)
        sources = {_GRAPHS: _own_digest()} | files
        sources |= {name: version for name in packages if (version := version_of(name))}
        now = _digests_of(sorted(files), is_known=True)
        self._last = now if self._known is None else self._last | now
        own = ((name, self._before.get((name, digest), digest)) for name, digest in now.items())
        globals_digest = short_digest(json.dumps([each for each in own if each[1]]))
        return dict(sorted(sources.items())), globals_digest

    def _ignore_changes(self) -> None:
        for name, digest in _digests_of(self._last).items():
            if (before := self._last[name]) != digest:
                self._before[name, digest] = self._before.get((name, before), before)


def _digests_of(names: Iterable[str], *, is_known: bool = False) -> dict[str, str]:
    found = loaded(names)
    absent = dict.fromkeys(names, "")
    return absent | {n: digest_of_globals(m, is_known=is_known) for n, m in found.items()}


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
    found = reached.files.items()
    return {name: at[1] + _if_edited(name, at[0], at[2]) for name, at in found}, reached.packages


def _if_edited(name: str, file: Path, time_ns: int) -> str:
    """The code of a module that was loaded from a file that may have been edited since."""
    module = loaded([name]).get(name) if time_ns > _STARTED else None
    # A file that was written just before the process started looks the same.
    return "" if module is None or is_code_of(module, file) else f" loaded as {code_of(module)}"


@functools.lru_cache(maxsize=64)
def _reach(names: frozenset[str]) -> _Reached:
    files: dict[str, tuple[Path, str, int, int]] = {}
    packages: set[str] = set()
    seen, todo = {""}, [*names]
    while todo:
        if (name := todo.pop()) in seen:
            continue
        seen.add(name)
        package, module = name.partition(".")[0], name.removesuffix(WHOLE)
        above, _, last = module.rpartition(".")
        source = _source(module)
        if not source:
            packages.add(package)
            if name != module and (source := _source(above)):
                todo += source.imports.for_types.get(last, ())
            continue
        files[module] = source.file, source.digest, source.time_ns, source.size
        if module == "__main__":  # of `python -m package.module`
            above = getattr(sys.modules[module], "__package__", None) or ""
        todo += [above, *source.imports.run]
        if name != module:
            todo += chain.from_iterable(source.imports.for_types.values())
    own = {_GRAPHS, *(name.partition(".")[0] for name in files)}
    return _Reached(files, frozenset(packages - own))


class _Source(NamedTuple):
    """An own file, not one of this package, and when it was changed."""

    file: Path
    digest: str
    time_ns: int
    size: int
    imports: Imports


def _source(module: str) -> _Source | None:
    if module.partition(".")[0] in ("", _GRAPHS) or not is_own(module):
        return None
    if not (file := file_of(module)):
        return None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    if module == "__main__":
        package = getattr(sys.modules[module], "__package__", None) or ""
    try:
        found = file.stat()
        digest, imports = _read(file, package, found.st_ctime_ns, found.st_size)
    except OSError:  # it was removed just now
        return None
    return _Source(file, digest, found.st_ctime_ns, found.st_size, imports)


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
def _read(file: Path, package: str, *_: int) -> tuple[str, Imports]:
    # The time of change and the size distinguish versions of a file in the cache.
    text = file.read_bytes()
    return hashlib.sha256(text).hexdigest()[:16], imports_in(text, package)


@functools.lru_cache(maxsize=1)
def _own_digest() -> str:
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        part = path.relative_to(folder)
        name = ".".join([_GRAPHS, *part.with_suffix("").parts]).removesuffix(".__init__")
        loaded_as = _if_edited(name, path, path.stat().st_ctime_ns)
        digest.update(f"{part.as_posix()}{loaded_as}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
