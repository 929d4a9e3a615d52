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
_WRITE_SECONDS = 5.0  # a file may still be written for so long
_UNSEALED = "never sealed, as after a kill"


class InductorCache:
    """The folder of inductor's kernels and graphs for one environment.

    Inductor does not check what it reads there. So the files are sealed with their SHA-256 after
    they were written. The next process that opens the cache removes files that differ from the
    seal or were never sealed, and inductor writes them again. Unsealed files stay while several
    processes use the cache, as another one may be about to seal them.

    Use it as a context manager, with :attr:`environment` set before inductor compiles anything::

        with store.inductor_cache(environment_factors()) as cache:
            os.environ.update(cache.environment)
            ...
            cache.seal()

    Args:
        folder: its name is the key of the environment.
        factors: factors of the environment; if given, the folder is created.

    Attributes:
        files: the folder for inductor.
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
        """Environment variables that make inductor use the folder."""
        return {"TORCHINDUCTOR_CACHE_DIR": str(self.files)}

    @property
    def bytes(self) -> int:
        """Size of all files."""
        total = 0
        for root, _, names in os.walk(self.files):
            for name in names:
                with suppress(OSError):  # removed by another process
                    total += os.lstat(os.path.join(root, name)).st_size
        return total

    @property
    def used(self) -> float:
        """Time of the last opening or sealing, in seconds since the epoch."""
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
        """Record the SHA-256 of new files; returns their number.

        Cheap enough to call after each capture. On a full disk they stay unsealed.
        """
        try:
            with self._sealing():
                sealed = self._read_seal()
                names = [name for name in _names_in(self.files) if not _is_lock(name)]
                fresh = self._fresh_digests(names, sealed)
                if fresh:
                    known = {name: sealed[name] for name in names if name in sealed}
                    write_whole(self._seal, json.dumps(known | fresh).encode())
        except (OSError, StoreBusy) as error:
            _log.warning("%s: not sealed: %s", self.files, error)
            return 0
        return len(fresh)

    def scrub(self) -> dict[str, str]:
        """Remove files that differ from the seal or belong to others; returns the reasons by name.

        Raises:
            UnsafeStore: the folder belongs to another user, or others can write to it.
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
                        _log.warning("%s: %s is discarded: %s", self.files, name, problem)
            if unsealed := [*problems.values()].count(_UNSEALED):
                _log.warning("%s: %d files are discarded: %s", self.files, unsealed, _UNSEALED)
        return problems

    def clear(self) -> int:
        """Remove the cache unless a process uses it; returns the number of bytes removed."""
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
        except FileNotFoundError:  # a temporary file
            return ""
        except (OSError, UnsafeStore) as error:
            return str(error)
        unsealed = name not in sealed and is_only_user and not _is_lock(name)
        return _UNSEALED if unsealed else ""

    def _fresh_digests(self, names: Iterable[str], sealed: Mapping[str, str]) -> dict[str, str]:
        # A file may have been half written when it was digested, so a change of size or time means
        # a new digest; files of other processes are read again only while they are recent.
        fresh = {}
        recently = self.used - _WRITE_SECONDS
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
        path = self.folder / "factors.json"
        if self._factors and not path.exists():
            with self._sealing():
                text = json.dumps(dict(self._factors), indent=1, sort_keys=True)
                write_whole(path, text.encode())

    @contextmanager
    def _sealing(self) -> Iterator[None]:
        with locked(self.folder / "seal.lock", shared=False, seconds=_PATIENCE):
            sweep(self.folder)
            yield

    def _shared_lock(self) -> Lock:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            self._make()
            lock = Lock(self.folder / "lock")
            # After a `clear` by another process this file is no longer the lock of the cache.
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


def _is_lock(name: str) -> bool:
    return name.endswith(".lock") or name.startswith("locks/")


def _names_in(folder: Path | str, below: str = "") -> Iterator[str]:
    """Files, links, and folders of other users, but not what is in those."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=attrgetter("name"))
    except OSError:  # it was temporary
        return
    for entry in found:
        name = below + entry.name
        if entry.is_dir(follow_symlinks=False) and is_of_user(entry):
            yield from _names_in(entry.path, name + "/")
        else:
            yield name
