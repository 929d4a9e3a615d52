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
    if not _damage(folder / MARKER):
        return
    if foreign := _foreign_name(folder):
        raise StoreError(f"{folder} is not a store, it holds {foreign}: give an empty folder")
    with exclusive():
        if not (damage := _damage(folder / MARKER)):  # another process wrote it meanwhile
            return
        if found := visible(folder):
            count = len(visible(folder / FOLDERS[0])) if folder / FOLDERS[0] in found else 0
            _log.warning(
                "%s: %s %s and is rewritten; %d entries are there", folder, MARKER, damage, count
            )
        if (folder / MARKER).is_dir():
            discard(folder / MARKER)
        write_whole(folder / MARKER, json.dumps(_FORMAT).encode())


def _damage(marker: Path) -> str:
    """What is wrong with a marker, empty if nothing is.

    Raises:
        StoreError: it belongs to another program or a newer version.
    """
    try:
        found = read_json(marker)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"is damaged ({error})"
    if found == _FORMAT:
        return ""
    is_marker = isinstance(found, dict) and isinstance(found.get("form"), str)
    if not is_marker or not isinstance(found.get("version"), int) or found["version"] < 1:
        return f"is damaged (it holds {reprlib.repr(found)})"
    raise StoreError(
        f"{marker} holds {reprlib.repr(found)}, expected {_FORMAT}: use another folder"
    )


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
