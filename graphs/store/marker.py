"""The marker `store.json`, which says that a folder is a store; written anew if it is damaged."""

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
"""The folders of a store, beside its marker."""

_FORM = {"form": "graphs store", "version": 1}
_KEY = re.compile("[0-9a-f]{64}")


def ensure_marker(folder: Path, exclusive: Callable[[], AbstractContextManager[None]]) -> None:
    """Make sure that a folder is a store of this version, or make an empty one a store.

    A marker that is damaged or missing is written anew where everything else is a store's: it says
    no more than that, and the entries of a store do not depend on it.

    Args:
        folder: of the store.
        exclusive: keeps other processes out meanwhile.

    Raises:
        StoreError: it is some other folder, or a newer version's store.
        OSError: the marker cannot be written.
    """
    if not _damage(folder / MARKER):
        return
    if stranger := _stranger(folder):
        raise StoreError(f"{folder} is not a store, it holds {stranger}: give an empty folder")
    with exclusive():
        if not (damage := _damage(folder / MARKER)):  # another process wrote it meanwhile
            return
        if found := visible(folder):
            count = len(visible(folder / FOLDERS[0])) if folder / FOLDERS[0] in found else 0
            _log.warning(
                "%s: %s %s and is written anew; %d entries are there", folder, MARKER, damage, count
            )
        if (folder / MARKER).is_dir():
            discard(folder / MARKER)
        write_whole(folder / MARKER, json.dumps(_FORM).encode())


def _damage(marker: Path) -> str:
    """What is wrong with a marker, or an empty string.

    Raises:
        StoreError: it is another program's, or a newer version's.
    """
    try:
        found = read_json(marker)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"is damaged ({error})"
    if found == _FORM:
        return ""
    is_marker = isinstance(found, dict) and isinstance(found.get("form"), str)
    if not is_marker or not isinstance(found.get("version"), int) or found["version"] < 1:
        return f"is damaged (it says {reprlib.repr(found)})"
    raise StoreError(f"{marker} says {reprlib.repr(found)}, expected {_FORM}: give another folder")


def _stranger(folder: Path) -> str:
    """Something in a folder that no store holds, or an empty string."""
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
