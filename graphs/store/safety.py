"""Checks of ownership: artifacts are code, so no other user may write or replace them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from graphs.errors import UnsafeStore
from graphs.files import digest_of_open, open_regular

__all__ = ["digests_of_own", "is_of_user", "open_own", "refuse_others", "refuse_unsafe"]

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def refuse_unsafe(folder: Path) -> None:
    """Check that only this user and root can change or replace `folder`.

    Raises:
        UnsafeStore: it belongs to another user, is writable by its group or by everyone, or a
            folder above it lets others rename it.
    """
    _refuse(folder, _OTHERS, os.stat(folder))
    for above in folder.parents:
        found = os.stat(above)
        own_group = 0 if found.st_gid == os.getgid() else stat.S_IWGRP
        writable = 0 if found.st_mode & stat.S_ISVTX else stat.S_IWOTH | own_group
        _refuse(above, writable, found)


def is_of_user(path: os.PathLike[str] | str) -> bool:
    """Whether a file, folder or link belongs to this user or root."""
    try:
        return os.lstat(path).st_uid in {0, os.getuid()}
    except OSError:
        return False


def refuse_others(path: Path) -> None:
    """Check that a file or folder is no link, and that only this user and root can change it.

    Raises:
        UnsafeStore: it is a link, belongs to another user, or is writable by others.
        OSError: it does not exist.
    """
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise UnsafeStore(f"{path} is a link, and a store is run as code: remove it")
    _refuse(path, _OTHERS if stat.S_ISDIR(found.st_mode) else 0, found)


@contextmanager
def open_own(
    path: Path | str, folder: int | None = None, *, in_reach: bool = False
) -> Iterator[IO[bytes]]:
    """Open a file for reading that is no link and belongs to this user or root.

    Checks the open file and not its path, so that it cannot be swapped in between.

    Args:
        path: the file.
        folder: descriptor of the folder that `path` is relative to.
        in_reach: whether others can reach the file, and so must not be able to write to it.

    Raises:
        UnsafeStore: it belongs to another user, is no regular file, or others can write to it.
        OSError: it cannot be opened.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(path, folder))
        except ValueError as error:
            raise UnsafeStore(f"{error}: remove it") from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UnsafeStore(
                f"{path} is a link, and its target would be run as code: remove it"
            ) from None
        _refuse(path, _OTHERS if in_reach else 0, os.fstat(file.fileno()))
        yield file


def digests_of_own(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder, by relative name.

    Raises:
        UnsafeStore: something belongs to another user or is no regular file, or others can write
            to a folder.
        OSError: something cannot be read.
    """
    found: dict[str, str] = {}
    for root, folders, names, handle in os.fwalk(folder, onerror=_raise):
        _refuse(root, _OTHERS, os.fstat(handle))
        for name in folders:
            if not stat.S_ISDIR(os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode):
                raise UnsafeStore(f"{os.path.join(root, name)} is a link: remove it")
        for name in names:
            with open_own(name, handle) as file:
                found[os.path.relpath(os.path.join(root, name), folder)] = digest_of_open(file)
    return found


def _raise(error: OSError) -> None:
    raise error


def _refuse(path: Path | str, writable: int, found: os.stat_result) -> None:
    users = {0, os.getuid()}
    if found.st_uid not in users:
        raise UnsafeStore(
            f"{path} belongs to user {found.st_uid}, expected {os.getuid()}, and a store is "
            "run as code: remove it, or put the store in a folder of your own"
        )
    if found.st_mode & writable:
        raise UnsafeStore(
            f"{path} is writable by others (mode {stat.S_IMODE(found.st_mode):o}), and a store is "
            f"run as code: chmod go-w {path}, or put the store elsewhere"
        )
