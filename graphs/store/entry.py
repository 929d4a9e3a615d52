"""Entries of a store: an artifact's files, their manifest, and a label for people who list them.

The manifest has the factors of the artifact and the digests of its files. The label is not part of
its key, and no loss if it is damaged.
"""

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

__all__ = [
    "Entry",
    "Label",
    "sweep_unfinished",
    "unfinished",
    "write_label",
    "write_manifest",
]

_FORM = "graphs store entry"
_MANIFEST = "manifest.json"
_FILES = "files"
_LABEL = "about.json"
_LOCK = ".lock"
_LONGEST = 80  # characters of a label


@dataclass(frozen=True)
class Entry:
    """The artifact that a store holds under one key.

    Attributes:
        key: SHA-256 of the factors.
        factors: everything that the artifact depends on.
        bytes: of its files.
        used: when it was last used, in seconds since the epoch.
        digests: SHA-256 of each file.
        folder: where it is.
    """

    key: str
    factors: Mapping[str, Any]
    bytes: int
    used: float
    digests: Mapping[str, str]
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> Entry:
        """Read the manifest of the entry in `folder`, and not its files.

        Raises:
            ValueError: it has none, or one that cannot be its own.
        """
        try:
            path = folder / _MANIFEST
            written = read_json(path)
            used = path.stat().st_mtime
            if written["form"] != _FORM:
                raise ValueError(f"its manifest is a {written['form']!r}")
            factors, digests = dict(written["factors"]), dict(written["digests"])
            size = int(written["bytes"])
            key = key_of(factors)
        except (OSError, LookupError, TypeError, ArithmeticError) as error:
            raise ValueError(f"its manifest is not readable ({error!r})") from error
        except RecursionError:
            raise ValueError("its manifest is nested too deeply") from None
        if key != folder.name:
            raise ValueError("its factors are not those of its key")
        return cls(folder.name, factors, size, used, digests, folder)

    @property
    def files(self) -> Path:
        """The folder of its files."""
        return self.folder / _FILES

    @property
    def label(self) -> Label:
        """Its label, for people."""
        return Label.read(self.folder)

    def problem(self) -> str:
        """What is wrong with its files, or an empty string; reads every byte and every owner."""
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
        """Note that it is used now."""
        os.utime(self.folder / _MANIFEST)


def write_manifest(folder: Path, factors: Mapping[str, Any]) -> int:
    """Write the manifest of the files in `folder`, after all of them; returns their bytes."""
    files = files_in(folder / _FILES)
    size = sum(path.stat().st_size for path in files.values())
    manifest = {
        "form": _FORM,
        "factors": dict(factors),
        "bytes": size,
        "digests": {name: digest_of(path) for name, path in files.items()},
    }
    write_whole(folder / _MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    return size


@dataclass(frozen=True)
class Label:
    """A short description; an empty text or None where an older version stored the artifact.

    Attributes:
        model: what was captured: its class, and how many parameters it has.
        name: of the graph, with its bucket if it has one, such as `step[tokens=16]`.
        made: when it was stored, in seconds since the epoch.
    """

    model: str = ""
    name: str = ""
    made: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Label:
        """The label of the entry in a folder."""
        try:
            written = read_json(folder / _LABEL)
        except (OSError, ValueError):
            return cls()
        if not isinstance(written, dict):
            return cls()
        made = written.get("made")
        is_time = isinstance(made, float) and math.isfinite(made)
        return cls(
            _line(written.get("model")), _line(written.get("name")), made if is_time else None
        )


def write_label(folder: Path, about: Mapping[str, str]) -> None:
    """Write the label of an entry that is being made in a folder."""
    # Not synced: a crash that costs it costs nothing else.
    text = json.dumps({"model": "", "name": "", **about, "made": time.time()})
    (folder / _LABEL).write_text(text, "utf-8")


def _line(text: Any) -> str:
    # It goes to a terminal, to which some characters are commands.
    shown = str(text)[:_LONGEST] if isinstance(text, str) else ""
    return "".join(char if char.isprintable() else "?" for char in shown)


@contextmanager
def unfinished(
    folder: Path, exclusive: Callable[[], AbstractContextManager[None]]
) -> Iterator[Path]:
    """A path in `folder` to write to; what is still there at the end is removed.

    Each has a lock, which the kernel releases when its process dies.

    Args:
        folder: of all unfinished entries.
        exclusive: keeps other processes out meanwhile.
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
    """Remove what dead processes left, while the caller keeps all others out."""
    # The lock comes before what it locks and goes after it: without one, no process is at work.
    paths = {path.with_suffix("") if path.suffix == _LOCK else path for path in visible(folder)}
    for path in paths:
        with closing(Lock(_lock_of(path))) as lock:
            if lock.take():
                remove(path)
                lock.path.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)
