"""A file lock between processes; the kernel releases it when its process dies."""

from __future__ import annotations

import errno
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
_CREATE = partial(os.open, mode=0o600)


def why_no_locks() -> str:
    """Why this system has no file locks, empty if it has."""
    return "" if fcntl else "it needs fcntl.flock, which this system does not have"


class Lock:
    """An open lock file. Two objects exclude each other even within one process.

    Garbage collection releases it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = FileIO(path, "a+", opener=_CREATE)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            self._file = FileIO(path, "r")  # of a read-only store, which can still be loaded from

    def take(self, *, shared: bool = False) -> bool:
        """Try to acquire the lock, or to switch between shared and exclusive; never waits."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_current(self) -> bool:
        """Whether the file at the path is still this one."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


@contextmanager
def locked(path: Path, *, shared: bool, seconds: float) -> Iterator[None]:
    """Context manager that holds the lock of a file.

    Raises:
        StoreBusy: others held it for all of `seconds`.
    """
    with closing(Lock(path)) as lock:
        end = time.monotonic() + seconds
        while not lock.take(shared=shared):
            if time.monotonic() > end:
                raise StoreBusy(
                    f"{path} was locked for {seconds:g} s: wait for the process that uses it, "
                    "or give this one another store"
                )
            time.sleep(_POLL_SECONDS)
        yield
