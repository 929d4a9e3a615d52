"""A store of artifacts on disk, each found by its factors: everything that it depends on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from graphs.errors import StoreError, UnsafeStore
from graphs.files import copy_whole, discard, read_json, sweep, sync_folder, visible
from graphs.store.entry import Entry, sweep_unfinished, unfinished, write_label, write_manifest
from graphs.store.factors import key_of
from graphs.store.inductor_cache import InductorCache
from graphs.store.lock import Lock, locked, why_no_locks
from graphs.store.marker import FOLDERS, ensure_marker
from graphs.store.safety import refuse_unsafe

__all__ = ["ArtifactStore", "Room"]

_log = logging.getLogger(__name__)

_SHARE = 8  # when entries have grown by this part of them, all is counted again
_LEAST = 16


class ArtifactStore:
    """A folder of compiled artifacts that processes share.

    An artifact is a file or a folder of files, found by its factors: a flat or nested mapping of
    text, numbers and lists that names everything it depends on. If any factor differs, it is
    another artifact. It is there completely or not at all, whenever a process is killed, and each
    use begins with its SHA-256; what is damaged or does not belong there is thrown away with a
    warning, and made again.

    What it holds is run as code, so only its user may be able to write to the folder. That keeps
    other users out, not programs of the same user.

    Args:
        path: the folder; it is made, readable by this user only, if there is none.
        max_bytes: above it, the least recently used artifacts are removed.
        lock_seconds: how long to wait for other processes.

    Raises:
        UnsafeStore: others can write to it.
        StoreError: it is some other folder, or a newer version's.
        OSError: it cannot be made.
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
        self._room = Room(self.path / ".room.json", max_bytes)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_unsafe(self.path)
        ensure_marker(self.path, lambda: self._locked(shared=False))
        for name in FOLDERS:
            (self.path / name).mkdir(mode=0o700, exist_ok=True)
            refuse_unsafe(self.path / name)
        self._sweep_if_alone()

    @contextmanager
    def use(self, factors: Mapping[str, Any]) -> Iterator[Path | None]:
        """The folder of an artifact's files, checked, for as long as the `with` block lasts.

        None if it is missing or damaged. No process removes it within the block, which must not
        call `put`.

        Raises:
            StoreBusy: another process writes for too long.
        """
        folder = self._artifacts / key_of(factors)
        with self._locked(shared=True):
            entry, problem = _checked(folder)
            if entry:
                with suppress(OSError):  # a store on a read-only disk can still be used
                    entry.touch()
                yield entry.files
                return
        if problem:
            self._discard(folder, problem)
        yield None

    def has(self, factors: Mapping[str, Any]) -> bool:
        """Whether there is an artifact of these factors; its files are not looked at."""
        return (self._artifacts / key_of(factors)).is_dir()

    def put(
        self,
        factors: Mapping[str, Any],
        source: str | Path,
        *,
        about: Mapping[str, str] | None = None,
    ) -> bool:
        """Store a copy of a file, or of the files of a folder; False if the disk does not take it.

        An artifact of the same factors is replaced. `about` is shown where artifacts are listed,
        and has no other effect.

        Raises:
            StoreBusy: another process uses the store for too long.
            TypeError: the factors are not made of text, numbers and lists.
            ValueError: `source` is neither, or has links in it.
        """
        key, source = key_of(factors), Path(source)
        if not source.exists():
            raise ValueError(f"{source} is neither a file nor a folder")
        try:
            with unfinished(self.path / "unfinished", lambda: self._locked(shared=False)) as fresh:
                fresh.mkdir(mode=0o700)
                copy_whole(source, fresh / "files")
                write_label(fresh, about or {})
                size = write_manifest(fresh, factors)
                with self._locked(shared=False):
                    discard(self._artifacts / key)
                    fresh.rename(self._artifacts / key)
                    sync_folder(self._artifacts)
                    if not self._room.take(size):
                        self._evict(self.max_bytes)
        except OSError as error:
            _log.warning("%s: %s is not stored: %s", self.path, key[:12], error)
            return False
        return (self._artifacts / key).is_dir()

    def entries(self) -> list[Entry]:
        """All readable entries, the one used last first."""
        found = []
        for folder in visible(self._artifacts):
            with suppress(ValueError):
                found.append(Entry.read(folder))
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    @property
    def bytes(self) -> int:
        """Of all artifacts and compile caches."""
        return sum(e.bytes for e in self.entries()) + sum(c.bytes for c in self.inductor_caches())

    def verify(self) -> dict[str, str]:
        """Check every byte and throw away what is damaged: the reason for each, by name."""
        problems = {}
        for folder in visible(self._artifacts):
            with self._locked(shared=True):
                _, problem = _checked(folder)
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
        """Remove the least recently used until no more than `max_bytes` are left.

        Returns the number of bytes removed. By default the store's own limit counts.
        """
        limit = self.max_bytes if max_bytes is None else max_bytes
        with self._locked(shared=False):
            before = self.bytes
            self._evict(limit)
            return before - self.bytes

    def clear(self) -> int:
        """Remove everything that no process is using; returns the number of bytes removed."""
        return self.prune(0)

    def inductor_cache(self, factors: Mapping[str, Any]) -> InductorCache:
        """The compile cache of inductor for an environment; see there how to use it."""
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
        # What others are busy with is not waited for: a later one sweeps.
        # A store on a read-only disk raises OSError.
        with suppress(OSError), closing(Lock(self.path / ".lock")) as lock:
            if lock.take():
                for name in ("", "artifacts", "inductor"):
                    sweep(self.path / name)
                sweep_unfinished(self.path / "unfinished")

    def _evict(self, limit: int) -> None:
        kept: list[Entry | InductorCache] = [*self.entries(), *self.inductor_caches()]
        total = sum(each.bytes for each in kept)
        for each in sorted(kept, key=lambda each: each.used):
            if total <= limit:
                break
            if isinstance(each, InductorCache):
                total -= each.clear()
            else:
                discard(each.folder)
                total -= each.bytes
        self._room.counted(total, len(kept))

    def _discard(self, folder: Path, problem: str) -> None:
        name, done = folder.name[:12], "thrown away"
        with self._locked(shared=False):
            if _checked(folder)[0]:  # another process stored it anew meanwhile
                return
            try:
                discard(folder)
            except OSError as error:
                done = f"not used, and cannot be thrown away ({error})"
        _log.warning("%s: %s is %s: %s", self.path, name, done, problem)


def _checked(folder: Path) -> tuple[Entry | None, str]:
    """The entry of a folder if it is whole, or what is wrong with it."""
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


class Room:
    """How much may still be stored before everything is counted again.

    Counting looks at every entry. So it is done when the bytes that were left are used up, and
    every time that an eighth more entries have come, as compile caches grow without being told of.
    What is removed meanwhile only makes the next count come early. For the holder of the store's
    lock.

    Args:
        path: of the note; one that is missing or damaged means no room.
        limit: of the store, in bytes; a note of another limit means no room.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit

    def take(self, size: int) -> bool:
        """Use `size` bytes of it for one entry; False if everything has to be counted."""
        note = self._read()
        if note.get("limit") != self._limit or note["bytes"] < size or note["entries"] < 1:
            return False
        self._write(note["bytes"] - size, note["entries"] - 1)
        return True

    def counted(self, used: int, entries: int) -> None:
        """Note what a count of everything found."""
        self._write(self._limit - used, max(_LEAST, entries // _SHARE))

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, LookupError, TypeError):
            note = read_json(self._path)
            return {name: int(note[name]) for name in ("limit", "bytes", "entries")}
        return {}

    def _write(self, size: int, entries: int) -> None:
        note = {"limit": self._limit, "bytes": size, "entries": entries}
        with suppress(OSError):  # a full disk leaves it empty
            self._path.write_text(json.dumps(note), "utf-8")
