"""Imports of source files, kept from one process to the next: to parse them takes a second."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphs.errors import StoreBusy, UnsafeStore
from graphs.files import digest_of, short_digest, write_whole
from graphs.store import imports as reader
from graphs.store.imports import Import, SourceFile, package_of, parse_source
from graphs.store.lock import locked
from graphs.store.safety import open_own

__all__ = ["KnownImports"]

_MOST = 4096  # files
_PATIENCE_SECONDS = 1.0


class KnownImports:
    """A note in a store of what files import, each found by its text.

    A note that is damaged, or that another version of this package wrote, is written anew.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / ".imports", folder / ".lock"
        self._files: dict[str, Any] | None = None  # by text, those used last at the end
        self._is_kept = True

    def read(self, name: str, file: Path) -> SourceFile:
        """The source of a module; empty where it cannot be parsed, which is not noted.

        Raises:
            OSError: it cannot be read.
        """
        text, package = file.read_bytes(), package_of(name, str(file))
        key = hashlib.sha256(package.encode() + b"\n" + text).hexdigest()[:32]
        if self._files is None:
            self._files = self._noted()
        if noted := self._files.pop(key, None):
            self._files[key] = noted
            return _from_note(noted)
        source = parse_source(package, text)
        if source is None:
            return SourceFile()
        self._files[key] = _for_note(source)
        self._is_kept = False
        return source

    def keep(self) -> None:
        """Adds what is new to the note, if that can be written."""
        if self._is_kept or self._files is None:
            return
        self._is_kept = True
        # A store that is busy, or on a read-only disk, can still be used.
        lock = locked(self._lock, shared=False, seconds=_PATIENCE_SECONDS)
        with suppress(OSError, StoreBusy), lock:
            others = (each for each in self._noted().items() if each[0] not in self._files)
            files = dict([*others, *self._files.items()][-_MOST:])
            text = json.dumps(files, separators=(",", ":")).encode()
            write_whole(self._path, _head(text) + text)

    def _noted(self) -> dict[str, Any]:
        with suppress(OSError, UnsafeStore), open_own(self._path) as file:
            head, text = file.readline(), file.read()
            if head == _head(text):
                files: dict[str, Any] = json.loads(text)
                return files
        return {}


def _head(text: bytes) -> bytes:
    """The first line of a note: what it depends on beside the files, and its own digest."""
    code = [digest_of(Path(file)) for file in (__file__, reader.__file__)]
    digest = hashlib.sha256(text).hexdigest()
    return f"{short_digest(f'{sys.version} {code}')} {digest}\n".encode()


def _for_note(source: SourceFile) -> list[Any]:
    imports = [
        [each.targets, sorted(each.bound), each.scope, each.is_optional] for each in source.imports
    ]
    mentions = {scope: sorted(names) for scope, names in source.mentions.items()}
    return [imports, mentions, sorted(source.registered)]


def _from_note(noted: Any) -> SourceFile:
    imports, mentions, registered = noted
    return SourceFile(
        [
            Import(tuple(targets), frozenset(bound), scope, is_optional)
            for targets, bound, scope, is_optional in imports
        ],
        {scope: {*names} for scope, names in mentions.items()},
        {*registered},
    )
