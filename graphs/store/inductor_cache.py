"""A compile cache of inductor that is checked before it is used."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.store.errors import StoreBusy
from graphs.store.factors import key_of
from graphs.store.files import digest_of, remove, write_whole
from graphs.store.lock import Lock, locked

if TYPE_CHECKING:
    from typing import Self

__all__ = ["InductorCache"]

_log = logging.getLogger(__name__)

_PATIENCE = 60.0
_UNSEALED = "never sealed, as after a kill"


class InductorCache:
    """The folder that inductor keeps kernels and graphs in, for one environment.

    Inductor does not check what it finds. So its files are sealed with their SHA-256 after they
    were written, and when the next process opens the cache, files that are not what was sealed, or
    never were sealed, are removed: inductor makes them again. Processes may use it at once; what
    is not sealed is then left alone, since another one may be about to.

    Use it as a context manager, with :attr:`environment` set before inductor compiles anything::

        with store.inductor_cache(environment_factors()) as cache:
            os.environ.update(cache.environment)
            ...
            cache.seal()
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder.name
        self._factors: dict[str, Any] = {}
        self._lock: Lock | None = None
        self._digested: dict[str, tuple[int, int]] = {}

    @classmethod
    def of(cls, parent: Path, factors: Mapping[str, Any]) -> InductorCache:
        """The cache of an environment, made if there is none."""
        cache = cls(parent / key_of(factors))
        cache._factors = dict(factors)
        cache._make()
        return cache

    @property
    def files(self) -> Path:
        """What inductor is to use as its cache."""
        return self.folder / "files"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the process that tell inductor."""
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
        self._lock = self._shared_lock()
        with suppress(OSError):  # there is none yet, or the disk is read-only
            os.utime(self._seal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def seal(self) -> int:
        """Vouch for what this process made inductor write since; returns the number of files.

        Cheap enough to be called after each capture. A disk that is full leaves them unsealed.
        """
        try:
            with locked(self.folder / "seal.lock", shared=False, seconds=_PATIENCE):
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
        """Remove what is not what was sealed; returns the reason for each file."""
        self._make()
        lock = Lock(self.folder / "lock")
        try:
            alone = lock.take()
            sealed, problems = self._read_seal(), {}
            for name in _names_in(self.files):
                path = self.files / name
                if path.is_symlink() or not path.is_file():
                    problems[name] = "it is a link or no file"
                elif name in sealed and digest_of(path) != sealed[name]:
                    problems[name] = "it does not have the SHA-256 it was sealed with"
                elif name not in sealed and alone and not _is_of_the_moment(name):
                    problems[name] = _UNSEALED
            for name, problem in problems.items():
                remove(self.files / name)
                if problem != _UNSEALED:
                    _log.warning("%s: %s is thrown away: %s", self.files, name, problem)
            if unsealed := [*problems.values()].count(_UNSEALED):
                _log.warning("%s: %d files are thrown away: %s", self.files, unsealed, _UNSEALED)
        finally:
            lock.close()
        return problems

    def clear(self) -> int:
        """Remove it, unless a process is using it; returns the number of bytes removed."""
        lock = Lock(self.folder / "lock")
        try:
            if not lock.take():
                return 0
            size = self.bytes
            remove(self.folder)
            return size
        finally:
            lock.close()

    def _fresh(self, names: Iterable[str], sealed: Mapping[str, str]) -> dict[str, str]:
        # A file that a worker or a compiler was about to write when it was digested is digested
        # anew; one that is gone was a temporary one.
        fresh = {}
        for name in names:
            with suppress(FileNotFoundError):
                found = os.stat(self.files / name)
                now = found.st_size, found.st_mtime_ns
                if name not in sealed or self._digested.get(name, now) != now:
                    fresh[name] = digest_of(self.files / name)
                    self._digested[name] = now
        return fresh

    def _make(self) -> None:
        self.files.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._factors and not (self.folder / "factors.json").exists():
            text = json.dumps(self._factors, indent=1, sort_keys=True)
            write_whole(self.folder / "factors.json", text.encode())

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

    @property
    def _seal(self) -> Path:
        return self.folder / "sealed.json"

    def _read_seal(self) -> dict[str, str]:
        try:
            read = json.loads(self._seal.read_bytes())
            return {str(name): str(digest) for name, digest in read.items()}
        except (OSError, ValueError, AttributeError):
            return {}


def _is_of_the_moment(name: str) -> bool:
    return name.endswith(".lock") or name.startswith("locks/")


def _names_in(folder: Path) -> Iterator[str]:
    start = len(str(folder)) + 1
    for root, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        yield from (os.path.join(root, name)[start:] for name in (*links, *names))
