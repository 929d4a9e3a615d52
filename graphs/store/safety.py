"""Compiled artifacts are code: nobody else may be able to put them, or their folder, in place."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from graphs.store.errors import UnsafeStore

__all__ = ["refuse_unsafe"]


def refuse_unsafe(folder: Path) -> None:
    """Check that only this user and root can change `folder`, or exchange it for another.

    Raises:
        UnsafeStore: the folder is another user's or is writable by its group or by everyone, or a
            folder above it lets someone else rename it.
    """
    _refuse(folder, stat.S_IWGRP | stat.S_IWOTH, os.stat(folder))
    for above in folder.parents:
        found = os.stat(above)
        own_group = 0 if found.st_gid == os.getgid() else stat.S_IWGRP
        writable = 0 if found.st_mode & stat.S_ISVTX else stat.S_IWOTH | own_group
        _refuse(above, writable, found)


def _refuse(folder: Path, writable: int, found: os.stat_result) -> None:
    users = {0, os.getuid()}
    if found.st_uid not in users:
        raise UnsafeStore(
            f"{folder} belongs to user {found.st_uid}, expected {os.getuid()}: "
            "keep the store in a folder of your own"
        )
    if found.st_mode & writable:
        raise UnsafeStore(
            f"{folder} is writable by others (mode {stat.S_IMODE(found.st_mode):o}), and what a "
            f"store holds is run: chmod go-w {folder}, or keep the store elsewhere"
        )
