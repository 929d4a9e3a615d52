"""`store.json`, which says that a folder is a store: made, checked, and written anew if damaged."""

from __future__ import annotations

import json
import logging
import re
import reprlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from graphs.errors import StoreError
from graphs.store.files import discard, read_json, visible, write_whole

__all__ = ["FOLDERS", "MARK", "check_mark"]

_log = logging.getLogger(__name__)

MARK = "store.json"
FOLDERS = ("artifacts", "unfinished", "inductor")
"""What a store holds beside its mark."""

_FORM = {"form": "graphs store", "version": 1}
_KEY = re.compile("[0-9a-f]{64}")


def check_mark(folder: Path, alone: Callable[[], AbstractContextManager[None]]) -> None:
    """See that a folder is a store of this version: an empty one becomes one, a damaged one heals.

    A mark that is damaged or missing is written anew where everything else is a store's: it says no
    more than that, and what the store holds is found by itself.

    Args:
        folder: of the store.
        alone: keeps other processes out meanwhile.

    Raises:
        StoreError: it is some other folder, or a newer version's store.
        OSError: the mark cannot be written.
    """
    if not _damage(folder / MARK):
        return
    if stranger := _stranger(folder):
        raise StoreError(f"{folder} is no store, it holds {stranger}: give an empty folder")
    with alone():
        if not (damage := _damage(folder / MARK)):  # another process wrote it meanwhile
            return
        if found := visible(folder):
            count = len(visible(folder / FOLDERS[0])) if folder / FOLDERS[0] in found else 0
            _log.warning(
                "%s: %s %s and is written anew; %d entries are there", folder, MARK, damage, count
            )
        if (folder / MARK).is_dir():
            discard(folder / MARK)
        write_whole(folder / MARK, json.dumps(_FORM).encode())


def _damage(mark: Path) -> str:
    """What is wrong with a mark, or an empty string.

    Raises:
        StoreError: nothing, but it is another program's, or a newer version's.
    """
    try:
        found = read_json(mark)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"is damaged ({error})"
    if found == _FORM:
        return ""
    is_mark = isinstance(found, dict) and isinstance(found.get("form"), str)
    if not is_mark or not isinstance(found.get("version"), int) or found["version"] < 1:
        return f"is damaged (it says {reprlib.repr(found)})"
    raise StoreError(f"{mark} says {reprlib.repr(found)}, expected {_FORM}: give another folder")


def _stranger(folder: Path) -> str:
    """What is in a folder that is not in a store's, or an empty string."""
    for path in visible(folder):
        if path.name == MARK:
            continue
        if path.name not in FOLDERS or path.is_symlink() or not path.is_dir():
            return path.name
        if path.name != "unfinished":
            for each in visible(path):
                if not _KEY.fullmatch(each.name):
                    return f"{path.name}/{each.name}"
    return ""
