"""A store of artifacts on disk, found by their factors: everything that they depend on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from graphs.errors import StoreError, UnsafeStore
from graphs.files import copy_whole, discard, sweep, sync_folder, visible
from graphs.store.entry import Entry, new_entry, sweep_unfinished, write_manifest
from graphs.store.factors import key_of
from graphs.store.inductor_cache import InductorCache
from graphs.store.lock import Lock, locked, why_no_locks
from graphs.store.marker import FOLDERS, ensure_marker
from graphs.store.safety import refuse_unsafe

__all__ = ["ArtifactStore"]

_log = logging.getLogger(__name__)

_RECOUNT_SHARE = 8  # all sizes are counted again after this part of the free space was used


class ArtifactStore:
    """A folder of compiled artifacts that processes share.

    An artifact is a file or a folder of files. Its factors, a flat or nested mapping of text,
    numbers and lists, name everything that it depends on: another value of any factor means another
    artifact. An entry is complete or absent, whenever a process is killed. Each use first checks
    its SHA-256; damaged and foreign entries are discarded with a warning, and built again.

    Artifacts are run as code, so only the user may be able to write to the folder. That protects
    from other users, not from programs of the same user.

    Args:
        path: the folder; created, for this user only, if it does not exist.
        max_bytes: limit above which the least recently used artifacts are evicted.
        lock_seconds: how long to wait for other processes.

    Raises:
        UnsafeStore: others can write to the folder.
        StoreError: the folder is no store, or one of a newer version.
        OSError: the folder cannot be created.
        ValueError: `max_bytes` is negative.

    Example::

        store = ArtifactStore("~/.cache/mine")
        with store.use(factors) as folder:
            if folder is not None:
                return load(folder / "graph.bin")
        store.put(factors, built)
    """

    def __init__(
        self, path: str | Path, *, max_bytes: int = 8 << 30, lock_seconds: float = 60.0
    ) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; expected at least 0")
        if reason := why_no_locks():
            raise StoreError(f"a store cannot work here: {reason}")
        self.path = Path(path).expanduser().resolve()
        self.max_bytes = max_bytes
        self._seconds = lock_seconds
        self._unchecked_bytes = 0  # that may be added before all sizes are counted again
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_unsafe(self.path)
        ensure_marker(self.path, lambda: self._locked(shared=False))
        for name in FOLDERS:
            (self.path / name).mkdir(mode=0o700, exist_ok=True)
            refuse_unsafe(self.path / name)
        self._sweep_if_alone()

    @contextmanager
    def use(self, factors: Mapping[str, Any]) -> Iterator[Path | None]:
        """Context manager that yields the verified folder of an artifact's files.

        Yields None if it is missing or damaged. No process removes the folder within the block,
        which must not call `put`.

        Raises:
            StoreBusy: another process wrote for too long.
        """
        folder = self._artifacts / key_of(factors)
        with self._locked(shared=True):
            entry, problem = _check(folder)
            if entry:
                with suppress(OSError):  # a read-only store can still be used
                    entry.touch()
                yield entry.files
                return
        if problem:
            self._discard(folder, problem)
        yield None

    def has(self, factors: Mapping[str, Any]) -> bool:
        """Whether there is an artifact of these factors; does not check its files."""
        return (self._artifacts / key_of(factors)).is_dir()

    def put(
        self,
        factors: Mapping[str, Any],
        source: str | Path,
        *,
        about: Mapping[str, str] | None = None,
    ) -> bool:
        """Store a copy of a file or folder, replacing an artifact of the same factors.

        Args:
            factors: everything that the artifact depends on.
            source: the file or folder.
            about: label for lists, with no other effect.

        Returns:
            False if the disk is full, or the artifact larger than the store.

        Raises:
            StoreBusy: another process used the store for too long.
            TypeError: the factors are not made of text, numbers and lists.
            ValueError: `source` does not exist or contains links.
        """
        key, source = key_of(factors), Path(source)
        if not source.exists():
            raise ValueError(f"{source} is neither a file nor a folder")
        try:
            with new_entry(self.path / "unfinished", lambda: self._locked(shared=False)) as fresh:
                fresh.mkdir(mode=0o700)
                copy_whole(source, fresh / "files")
                size = write_manifest(fresh, factors, about or {})
                with self._locked(shared=False):
                    discard(self._artifacts / key)
                    fresh.rename(self._artifacts / key)
                    sync_folder(self._artifacts)
                    self._unchecked_bytes -= size
                    if self._unchecked_bytes < 0:
                        self._evict(self.max_bytes)
        except OSError as error:
            _log.warning("%s: %s is not stored: %s", self.path, key[:12], error)
            return False
        return (self._artifacts / key).is_dir()

    def entries(self) -> list[Entry]:
        """All readable entries, most recently used first."""
        found = []
        for folder in visible(self._artifacts):
            with suppress(ValueError):
                found.append(Entry.read(folder))
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    @property
    def bytes(self) -> int:
        """Size of all artifacts and compile caches."""
        return sum(e.bytes for e in self.entries()) + sum(c.bytes for c in self.inductor_caches())

    def verify(self) -> dict[str, str]:
        """Check every byte and discard what is damaged; returns the reasons by name."""
        problems = {}
        for folder in visible(self._artifacts):
            with self._locked(shared=True):
                _, problem = _check(folder)
            if problem:
                problems[folder.name] = problem
                self._discard(folder, problem)
        for cache in self.inductor_caches():
            key = cache.key[:12]
            try:
                problems |= {f"{key}/{name}": why for name, why in cache.scrub().items()}
            except UnsafeStore as error:
                problems[key] = str(error)
        return problems

    def prune(self, max_bytes: int | None = None) -> int:
        """Evict the least recently used until at most `max_bytes` are left, by default the limit.

        Returns the number of bytes removed.
        """
        limit = self.max_bytes if max_bytes is None else max_bytes
        with self._locked(shared=False):
            before = self.bytes
            self._evict(limit)
            return before - self.bytes

    def clear(self) -> int:
        """Remove everything that no process uses; returns the number of bytes removed."""
        return self.prune(0)

    def inductor_cache(self, factors: Mapping[str, Any]) -> InductorCache:
        """The compile cache of inductor for an environment."""
        return InductorCache(self.path / "inductor" / key_of(factors), factors)

    def inductor_caches(self) -> list[InductorCache]:
        """The compile caches of all environments."""
        folders = visible(self.path / "inductor")
        return [InductorCache(folder) for folder in folders if folder.is_dir()]

    @property
    def _artifacts(self) -> Path:
        return self.path / "artifacts"

    def _locked(self, *, shared: bool) -> AbstractContextManager[None]:
        return locked(self.path / ".lock", shared=shared, seconds=self._seconds)

    def _sweep_if_alone(self) -> None:
        # Never waits: if others use the store, a later process sweeps.
        with suppress(OSError), closing(Lock(self.path / ".lock")) as lock:
            if lock.take():
                for name in ("", "artifacts", "inductor"):
                    sweep(self.path / name)
                sweep_unfinished(self.path / "unfinished")

    def _evict(self, limit: int) -> None:
        found: list[Entry | InductorCache] = [*self.entries(), *self.inductor_caches()]
        total = sum(each.bytes for each in found)
        for each in sorted(found, key=lambda each: each.used):
            if total <= limit:
                break
            if isinstance(each, InductorCache):
                total -= each.clear()
            else:
                discard(each.folder)
                total -= each.bytes
        self._unchecked_bytes = (self.max_bytes - total) // _RECOUNT_SHARE

    def _discard(self, folder: Path, problem: str) -> None:
        name, done = folder.name[:12], "discarded"
        with self._locked(shared=False):
            if _check(folder)[0]:  # another process stored it again meanwhile
                return
            try:
                discard(folder)
            except OSError as error:
                done = f"not used, and cannot be discarded ({error})"
        _log.warning("%s: %s is %s: %s", self.path, name, done, problem)


def _check(folder: Path) -> tuple[Entry | None, str]:
    """The entry of a folder if it is intact, else a description of the problem."""
    if not os.path.lexists(folder):
        return None, ""
    if folder.is_symlink() or not folder.is_dir():
        return None, "it is not an entry of a store"
    try:
        entry = Entry.read(folder)
    except ValueError as error:
        return None, str(error)
    problem = entry.problem()
    return (None, problem) if problem else (entry, "")
