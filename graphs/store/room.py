"""The room that a store has left, noted when it was counted, for a `put` that counts nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphs.errors import parse_json

__all__ = ["Room"]

_SHARE = 8  # as many more entries as this part of those there are, and it is counted again
_LEAST = 16


class Room:
    """How much may still be stored before everything is counted again.

    Counting looks at every entry. So it is done when the bytes that were left are used up, and
    every time that an eighth more entries came, as compile caches grow without being told of.
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
            note = parse_json(self._path.read_text("utf-8"))
            return {name: int(note[name]) for name in ("limit", "bytes", "entries")}
        return {}

    def _write(self, size: int, entries: int) -> None:
        note = {"limit": self._limit, "bytes": size, "entries": entries}
        with suppress(OSError):  # a full disk leaves it empty
            self._path.write_text(json.dumps(note), "utf-8")
