"""Files that are whole or not there: copies with fsync, digests, listings without links."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

__all__ = ["copy_whole", "digest_of", "files_in", "remove", "sync_folder", "write_whole"]


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there with all of its bytes, or not at all, after a crash too.

    Raises:
        OSError: it cannot be written; what was at `path` before still is.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file or the files of a folder to where nothing is yet, down to the disk.

    Raises:
        OSError: it cannot be read or written.
        ValueError: there is something other than files and folders in it.
    """
    if source.is_file():
        target.mkdir(mode=0o700)
        _copy(source, target / source.name)
    else:
        for name, path in files_in(source).items():
            _copy(path, target / name)
    for folder, _, _ in os.walk(target):
        sync_folder(Path(folder))


def files_in(folder: Path) -> dict[str, Path]:
    """The files below a folder, by their name relative to it.

    Raises:
        ValueError: a link, a pipe or the like is in it.
    """
    found: dict[str, Path] = {}
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(root, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                found[path.relative_to(folder).as_posix()] = path
            elif not stat.S_ISDIR(mode):
                raise ValueError(f"{path} is neither a file nor a folder")
    return dict(sorted(found.items()))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with source.open("rb") as given, target.open("xb") as file:
        shutil.copyfileobj(given, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
