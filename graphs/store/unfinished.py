"""Unfinished entries: folders that are written to before they become entries of a store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from graphs.files import remove, visible
from graphs.store.lock import Lock

__all__ = ["sweep_unfinished", "unfinished"]

_LOCK = ".lock"


@contextmanager
def unfinished(
    folder: Path, exclusive: Callable[[], AbstractContextManager[None]]
) -> Iterator[Path]:
    """A path in `folder` to write to; what is still there at the end is removed.

    Each has a lock, which the kernel releases when its process dies.

    Args:
        folder: of all unfinished entries.
        exclusive: keeps other processes out meanwhile.
    """
    path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
    with exclusive():
        sweep_unfinished(folder)
        lock = Lock(_lock_of(path))
        lock.take()
    try:
        yield path
    finally:
        remove(path)
        lock.path.unlink(missing_ok=True)
        lock.close()


def sweep_unfinished(folder: Path) -> None:
    """Remove what dead processes left, while the caller keeps all others out."""
    # The lock comes before what it locks and goes after it: without one, no process is at work.
    paths = {path.with_suffix("") if path.suffix == _LOCK else path for path in visible(folder)}
    for path in paths:
        with closing(Lock(_lock_of(path))) as lock:
            if lock.take():
                remove(path)
                lock.path.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)
