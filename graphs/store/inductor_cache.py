"""A compile cache of inductor that is checked before it is used."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from graphs.errors import StoreBusy, UnsafeStore
from graphs.files import digest_of, digest_of_open, discard, read_json, remove, sweep, write_whole
from graphs.store.lock import Lock, locked
from graphs.store.safety import is_of_user, open_own, refuse_others

__all__ = ["InductorCache"]

_log = logging.getLogger(__name__)

_PATIENCE = 60.0
_SHORTLY = 5.0  # seconds that a file may take to be written
_UNSEALED = "never sealed, as after a kill"


class InductorCache:
    """The folder that inductor keeps kernels and graphs in, for one environment.

    Inductor does not check what it finds. So its files are sealed with their SHA-256 after they
    were written, and when the next process opens the cache, files that differ from what was
    sealed, or never were sealed, are removed: inductor makes them again. While several processes
    use it, unsealed files are left alone, since another one may be about to seal them.

    Use it as a context manager, with :attr:`environment` set before inductor compiles anything::

        with store.inductor_cache(environment_factors()) as cache:
            os.environ.update(cache.environment)
            ...
            cache.seal()

    Args:
        folder: named by the key of the environment.
        factors: of the environment; the folder is made if there is none.

    Attributes:
        files: the folder that inductor is to use.
    """

    def __init__(self, folder: Path, factors: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.key = folder.name
        self.files = folder / "files"
        self._seal = folder / "sealed.json"
        self._factors = factors
        self._lock: Lock | None = None
        self._digested: dict[str, tuple[int, int]] = {}
        if factors:
            self._make()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make inductor use it."""
        return {"TORCHINDUCTOR_CACHE_DIR": str(self.files)}

    @property
    def bytes(self) -> int:
        """Of all files in it."""
        total = 0
        for root, _, names in os.walk(self.files):
            for name in names:
                with suppress(OSError):  # others may be at work in it
                    total += os.lstat(os.path.join(root, name)).st_size
        return total

    @property
    def used(self) -> float:
        """When it was last opened or sealed, in seconds since the epoch."""
        try:
            return self._seal.stat().st_mtime
        except OSError:
            return 0.0

    def __enter__(self) -> Self:
        self.scrub()
        with suppress(OSError):  # there is none yet, or the disk is read-only
            os.utime(self._seal)
        self._lock = self._shared_lock()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def seal(self) -> int:
        """Record the SHA-256 of what inductor wrote since; returns the number of files.

        Cheap enough to be called after each capture. A disk that is full leaves them unsealed.
        """
        try:
            with self._sealing():
                sealed = self._read_seal()
                there = [name for name in _names_in(self.files) if not _is_of_the_moment(name)]
                kept = {name: sealed[name] for name in there if name in sealed}
                fresh = self._fresh(there, sealed)
                if fresh:
                    write_whole(self._seal, json.dumps(kept | fresh).encode())
        except (OSError, StoreBusy) as error:
            _log.warning("%s: not sealed: %s", self.files, error)
            return 0
        return len(fresh)

    def scrub(self) -> dict[str, str]:
        """Remove what differs from what was sealed, or is another user's; the reason for each file.

        Raises:
            UnsafeStore: its folder is another user's, or others can write to it.
        """
        self._make()
        for folder in (self.folder, self.files):
            refuse_others(folder)
        problems = {}
        with closing(Lock(self.folder / "lock")) as lock:
            is_only_user = lock.take()
            with self._sealing():
                sealed = self._read_seal()
            for name in [*_names_in(self.files)]:
                if problem := self._problem(name, sealed, is_only_user):
                    problems[name] = problem
                    remove(self.files / name)
                    if problem != _UNSEALED:
                        _log.warning("%s: %s is thrown away: %s", self.files, name, problem)
            if unsealed := [*problems.values()].count(_UNSEALED):
                _log.warning("%s: %d files are thrown away: %s", self.files, unsealed, _UNSEALED)
        return problems

    def clear(self) -> int:
        """Remove it, unless a process is using it; returns the number of bytes removed."""
        with closing(Lock(self.folder / "lock")) as lock:
            if not lock.take():
                return 0
            size = self.bytes
            discard(self.folder)
            return size

    def _problem(self, name: str, sealed: Mapping[str, str], is_only_user: bool) -> str:
        try:
            with open_own(self.files / name) as file:
                if name in sealed and digest_of_open(file) != sealed[name]:
                    return "it does not have the SHA-256 it was sealed with"
        except FileNotFoundError:  # a temporary one
            return ""
        except (OSError, UnsafeStore) as error:
            return str(error)
        unsealed = name not in sealed and is_only_user and not _is_of_the_moment(name)
        return _UNSEALED if unsealed else ""

    def _fresh(self, names: Iterable[str], sealed: Mapping[str, str]) -> dict[str, str]:
        # A file that a worker or a compiler was about to write when it was digested is digested
        # anew, by another process only shortly after; one that is gone was a temporary one.
        fresh = {}
        recently = self.used - _SHORTLY
        for name in names:
            with suppress(FileNotFoundError):
                found = os.stat(self.files / name)
                if name in sealed and name not in self._digested and found.st_mtime < recently:
                    continue
                now = found.st_size, found.st_mtime_ns
                if name not in sealed or self._digested.get(name) != now:
                    digest = digest_of(self.files / name)
                    self._digested[name] = now
                    if sealed.get(name) != digest:
                        fresh[name] = digest
        return fresh

    def _make(self) -> None:
        for folder in (self.folder, self.files):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        told = self.folder / "factors.json"
        if self._factors and not told.exists():
            with self._sealing():
                write_whole(
                    told, json.dumps(dict(self._factors), indent=1, sort_keys=True).encode()
                )

    @contextmanager
    def _sealing(self) -> Iterator[None]:
        with locked(self.folder / "seal.lock", shared=False, seconds=_PATIENCE):
            sweep(self.folder)  # nobody else writes there now
            yield

    def _shared_lock(self) -> Lock:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            self._make()
            lock = Lock(self.folder / "lock")
            # One that is taken is being scrubbed, or cleared: then this is no longer its lock.
            if lock.take(shared=True) and lock.is_current():
                return lock
            lock.close()
            time.sleep(0.01)
        raise StoreBusy(f"{self.folder} was locked for {_PATIENCE:g} s: wait, or use another store")

    def _read_seal(self) -> dict[str, str]:
        try:
            read = read_json(self._seal)
            return {str(name): str(digest) for name, digest in read.items()}
        except (OSError, ValueError, AttributeError):
            return {}


def _is_of_the_moment(name: str) -> bool:
    return name.endswith(".lock") or name.startswith("locks/")


def _names_in(folder: Path | str, below: str = "") -> Iterator[str]:
    """Files, links, and folders of other users, none of what is in those."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=attrgetter("name"))
    except OSError:  # it was a temporary one
        return
    for entry in found:
        name = below + entry.name
        if entry.is_dir(follow_symlinks=False) and is_of_user(entry):
            yield from _names_in(entry.path, name + "/")
        else:
            yield name
