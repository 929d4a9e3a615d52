"""What source files import, kept from one process to the next: to parse them takes a second."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphs.files import digest_of, read_json, short_digest, write_whole
from graphs.store import imports
from graphs.store.imports import Import, SourceFile, package_of, parse_source

__all__ = ["KnownImports"]

_MOST = 4096  # files


class KnownImports:
    """A note of what files import, each found by its text.

    A note that is damaged, or that another version of this package wrote, is written anew.

    Args:
        path: of the note, a JSON file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Any] | None = None  # by text, those used last at the end
        self._is_kept = True

    def read(self, name: str, file: Path) -> SourceFile:
        """The source of a module.

        Raises:
            OSError: it cannot be read.
        """
        text, package = file.read_bytes(), package_of(name, str(file))
        key = hashlib.sha256(package.encode() + b"\n" + text).hexdigest()[:32]
        if self._files is None:
            self._files = self._noted()
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            source = _from_note(noted := self._files.pop(key))
            self._files[key] = noted
            return source
        source, self._is_kept = parse_source(package, text), False
        self._files[key] = _for_note(source)
        return source

    def keep(self) -> None:
        """Writes the note, if something is new and it can be written."""
        if self._is_kept or self._files is None:
            return
        files = dict([*self._files.items()][-_MOST:])
        with suppress(OSError):  # a store on a read-only disk can still be used
            note = {"reader": _reader(), "files": files}
            write_whole(self._path, json.dumps(note, separators=(",", ":")).encode())
            self._is_kept = True

    def _noted(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, LookupError, TypeError):
            note = read_json(self._path)
            if note["reader"] == _reader():
                return dict(note["files"])
        return {}


def _reader() -> str:
    """What else the content of a note depends on."""
    return short_digest(f"{sys.version} {digest_of(Path(imports.__file__))}")


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
            Import(tuple(targets), frozenset(bound), str(scope), bool(is_optional))
            for targets, bound, scope, is_optional in imports
        ],
        {scope: {*names} for scope, names in mentions.items()},
        {*registered},
    )
