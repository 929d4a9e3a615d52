"""Entries of a store: the files of an artifact, and a manifest of its factors and digests."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphs.errors import StoreError
from graphs.files import digest_of, files_in, read_json, remove, visible, write_whole
from graphs.store.factors import key_of
from graphs.store.lock import Lock
from graphs.store.safety import digests_of_own, refuse_others

__all__ = ["Entry", "Label", "new_entry", "sweep_unfinished", "write_manifest"]

_FORM = "graphs store entry"
_MANIFEST = "manifest.json"
_FILES = "files"
_LOCK = ".lock"
_MAX_LABEL = 80  # characters


@dataclass(frozen=True)
class Label:
    """A description for lists.

    Attributes:
        model: class and number of parameters of the captured module.
        name: name of the graph with its bucket, such as `step[tokens=16]`.
        made: time when it was stored, in seconds since the epoch.
    """

    model: str = ""
    name: str = ""
    made: float | None = None

    @classmethod
    def parse(cls, about: Any) -> Label:
        """The label in a manifest, empty where that is damaged."""
        found = about if isinstance(about, dict) else {}
        made = found.get("made")
        is_time = isinstance(made, float) and math.isfinite(made)
        return cls(_line(found.get("model")), _line(found.get("name")), made if is_time else None)


@dataclass(frozen=True)
class Entry:
    """A stored artifact.

    Attributes:
        key: SHA-256 of the factors.
        factors: everything that the artifact depends on.
        bytes: size of its files.
        used: time of the last use, in seconds since the epoch.
        digests: SHA-256 of each file.
        folder: folder of the entry.
        label: describes it in lists; not part of the key.
    """

    key: str
    factors: Mapping[str, Any]
    bytes: int
    used: float
    digests: Mapping[str, str]
    folder: Path
    label: Label

    @classmethod
    def read(cls, folder: Path) -> Entry:
        """Read the manifest of the entry in `folder`; does not check its files.

        Raises:
            ValueError: the manifest is missing, damaged or of another entry.
        """
        try:
            path = folder / _MANIFEST
            found = read_json(path)
            used = path.stat().st_mtime
            if found["form"] != _FORM:
                raise ValueError(f"its manifest is a {found['form']!r}")
            factors, digests = dict(found["factors"]), dict(found["digests"])
            size = int(found["bytes"])
            key = key_of(factors)
        except (OSError, LookupError, TypeError, ArithmeticError) as error:
            raise ValueError(f"its manifest is not readable ({error!r})") from error
        except RecursionError:
            raise ValueError("its manifest is nested too deeply") from None
        if key != folder.name:
            raise ValueError("its factors are not those of its key")
        return cls(key, factors, size, used, digests, folder, Label.parse(found.get("about")))

    @property
    def files(self) -> Path:
        """The folder of its files."""
        return self.folder / _FILES

    def problem(self) -> str:
        """Check every byte and owner; describes what is wrong, empty if nothing is."""
        try:
            refuse_others(self.folder)
            refuse_others(self.folder / _MANIFEST)
            found = digests_of_own(self.files)
        except (OSError, StoreError) as error:
            return str(error)
        if found.keys() != self.digests.keys():
            odd = sorted(found.keys() ^ self.digests.keys())
            return f"its files are not those of its manifest: {', '.join(odd[:3])}"
        wrong = sorted(name for name in found if found[name] != self.digests[name])
        return f"{wrong[0]} does not have the SHA-256 of its manifest" if wrong else ""

    def touch(self) -> None:
        """Set the time of the last use to now."""
        os.utime(self.folder / _MANIFEST)


def write_manifest(folder: Path, factors: Mapping[str, Any], about: Mapping[str, str]) -> int:
    """Write the manifest of the files in `folder`; returns their size in bytes."""
    files = files_in(folder / _FILES)
    size = sum(path.stat().st_size for path in files.values())
    manifest = {
        "form": _FORM,
        "factors": dict(factors),
        "about": {**about, "made": time.time()},
        "bytes": size,
        "digests": {name: digest_of(path) for name, path in files.items()},
    }
    write_whole(folder / _MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    return size


def _line(text: Any) -> str:
    # Labels are printed to a terminal, which would obey control characters.
    shown = str(text)[:_MAX_LABEL] if isinstance(text, str) else ""
    return "".join(char if char.isprintable() else "?" for char in shown)


@contextmanager
def new_entry(
    folder: Path, exclusive: Callable[[], AbstractContextManager[None]]
) -> Iterator[Path]:
    """Context manager that yields a new path in `folder`, and removes what is there at the end.

    The path has a lock, so that others can tell whether its process is alive.

    Args:
        folder: holds all unfinished entries.
        exclusive: locks the store.
    """
    path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
    with exclusive():
        sweep_unfinished(folder)
        lock = Lock(_lock_of(path))
        lock.take()
    try:
        yield path
    finally:
        remove(path)
        lock.path.unlink(missing_ok=True)
        lock.close()


def sweep_unfinished(folder: Path) -> None:
    """Remove what dead processes left; the caller holds the lock of the store."""
    # A lock is created before its path and removed after it, so a path without one is dead.
    paths = {path.with_suffix("") if path.suffix == _LOCK else path for path in visible(folder)}
    for path in paths:
        with closing(Lock(_lock_of(path))) as lock:
            if lock.take():
                remove(path)
                lock.path.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)
