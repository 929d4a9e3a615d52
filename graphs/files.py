"""Atomic writes and removals of files and folders, by renaming; digests and safe reads."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from graphs.errors import parse_json

__all__ = [
    "copy_whole",
    "digest_of",
    "digest_of_open",
    "discard",
    "files_in",
    "open_regular",
    "read_json",
    "remove",
    "short_digest",
    "sweep",
    "sync_folder",
    "visible",
    "write_whole",
]

# Endings of hidden names that are being written or deleted.
_LEFTOVER = (".new", ".trash")
_MOST_JSON = 64 << 20


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return digest_of_open(file)


def digest_of_open(file: IO[bytes]) -> str:
    """SHA-256 of the rest of an open file."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def short_digest(text: str) -> str:
    """The first 16 digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


@contextmanager
def open_regular(path: Path | str, folder: int | None = None) -> Iterator[IO[bytes]]:
    """Open a regular file for reading, without following a link or waiting for a pipe.

    Args:
        path: the file.
        folder: descriptor of the folder that `path` is relative to.

    Raises:
        OSError: it cannot be opened, or is a link or a folder.
        ValueError: it is a pipe, a device or the like.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)

    with open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is neither a file nor a folder")
        yield file


def read_json(path: Path) -> Any:
    """Parse a JSON file that may be damaged in any way.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file, no JSON, nested too deeply, or larger than 64 MiB.
    """
    with open_regular(path) as file:
        data = file.read(_MOST_JSON + 1)
    if len(data) > _MOST_JSON:
        raise ValueError(f"{path.name} is larger than {_MOST_JSON} bytes")
    return parse_json(data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically and durably.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    fresh = _hidden_name(path, ".new")
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
    """Copy a file or folder into the new folder `target`, and sync it to the disk.

    Raises:
        OSError: it cannot be read or written.
        ValueError: it contains something other than files and folders.
    """
    target.mkdir(mode=0o700)
    files = {source.name: source} if source.is_file() else files_in(source)
    for name, path in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as given, (target / name).open("xb") as file:
            shutil.copyfileobj(given, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    for folder, _, _ in os.walk(target):
        os.chmod(folder, 0o700)  # whatever the umask
        sync_folder(Path(folder))


def files_in(folder: Path) -> dict[str, Path]:
    """The files below a folder, by relative name.

    Raises:
        ValueError: it contains something other than files and folders.
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
    """Remove a file or folder if it exists; a kill may leave part of a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove a file or folder if it exists; others never see part of it under its name.

    Raises:
        OSError: it cannot be renamed, and is unchanged.
    """
    trash = _hidden_name(path, ".trash")
    try:
        path.rename(trash)
    except FileNotFoundError:
        return
    with suppress(OSError):  # the next sweep removes the rest
        remove(trash)


def sweep(folder: Path) -> None:
    """Remove what killed processes left half written or half deleted.

    Call it while no other process writes to the folder.
    """
    for path in folder.glob(".*"):
        if path.name.endswith(_LEFTOVER):
            with suppress(OSError):
                remove(path)


def visible(folder: Path) -> list[Path]:
    """The entries of a folder that are not hidden, sorted."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hidden_name(path: Path, ending: str) -> Path:
    # In the same file system, and unique for each thread of each process.
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{ending}")
