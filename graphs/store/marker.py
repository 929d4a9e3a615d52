"""The file `store.json`, which marks a folder as a store; rewritten if it is damaged."""

from __future__ import annotations

import json
import logging
import re
import reprlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from graphs.errors import StoreError
from graphs.files import discard, read_json, visible, write_whole

__all__ = ["FOLDERS", "ensure_marker"]

_log = logging.getLogger(__name__)

MARKER = "store.json"
FOLDERS = ("artifacts", "unfinished", "inductor")
"""Subfolders of a store."""

_FORMAT = {"form": "graphs store", "version": 1}
_KEY = re.compile("[0-9a-f]{64}")


def ensure_marker(folder: Path, exclusive: Callable[[], AbstractContextManager[None]]) -> None:
    """Check that a folder is a store of this version, or turn an empty folder into one.

    A damaged or missing marker is rewritten if the folder holds nothing but a store, whose entries
    do not depend on it.

    Args:
        folder: folder of the store.
        exclusive: locks the store.

    Raises:
        StoreError: the folder holds something else, or a store of a newer version.
        OSError: the marker cannot be written.
    """
    marker = folder / MARKER
    if not _damage(marker):
        return
    if foreign := _foreign_name(folder):
        raise StoreError(f"{folder} is not a store, it holds {foreign}: give an empty folder")
    with exclusive():
        if not (damage := _damage(marker)):  # another process wrote it meanwhile
            return
        if visible(folder):
            _log.warning("%s: %s is damaged (%s) and is rewritten", folder, MARKER, damage)
        if marker.is_dir():
            discard(marker)
        write_whole(marker, json.dumps(_FORMAT).encode())


def _damage(marker: Path) -> str:
    try:
        found = read_json(marker)
    except (OSError, ValueError) as error:
        return f"{error}"
    if found == _FORMAT:
        return ""
    text = reprlib.repr(found)
    match found:
        case {"form": str(), "version": int(version)} if version > 0:
            raise StoreError(f"{marker} holds {text}, expected {_FORMAT}: use another folder")
    return f"it holds {text}"


def _foreign_name(folder: Path) -> str:
    """The name of something in a folder that is not part of a store, empty if there is none."""
    for path in visible(folder):
        if path.name == MARKER:
            continue
        if path.name not in FOLDERS or path.is_symlink() or not path.is_dir():
            return path.name
        if path.name != "unfinished":
            for each in visible(path):
                if not _KEY.fullmatch(each.name):
                    return f"{path.name}/{each.name}"
    return ""
