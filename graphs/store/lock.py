"""A lock between processes, which the kernel releases when its process dies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path

from graphs.errors import StoreBusy

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

__all__ = ["Lock", "locked", "why_no_locks"]

_POLL_SECONDS = 0.01
_CREATE = partial(os.open, mode=0o600)  # no line of Python between the descriptor and its owner


def why_no_locks() -> str:
    """Why this system has no such locks, or an empty string."""
    return "" if fcntl else "it needs fcntl.flock, which this system does not have"


class Lock:
    """An open lock file, held or not. Each is a lock of its own, even within one process.

    One that is garbage collected is released, and so is one of a function that was interrupted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = FileIO(path, "a+", opener=_CREATE)

    def take(self, *, shared: bool = False) -> bool:
        """Acquire it, or switch between shared and exclusive; False if others hold it."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_current(self) -> bool:
        """Whether the file is still the one that others find by its path."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release it."""
        self._file.close()


@contextmanager
def locked(path: Path, *, shared: bool, seconds: float) -> Iterator[None]:
    """Hold the lock of a file.

    Raises:
        StoreBusy: others held it for all of `seconds`.
    """
    with closing(Lock(path)) as lock:
        end = time.monotonic() + seconds
        while not lock.take(shared=shared):
            if time.monotonic() > end:
                raise StoreBusy(
                    f"{path} was locked for {seconds:g} s: wait for the process that uses the "
                    "store, or give this one another store"
                )
            time.sleep(_POLL_SECONDS)
        yield
