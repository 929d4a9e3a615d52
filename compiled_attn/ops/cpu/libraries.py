"""The cache of built libraries: integrity and build locks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from graphs.errors import StoreBusy
from graphs.files import digest_of, digest_of_open, sync_folder, write_whole
from graphs.store.lock import Lock
from graphs.store.safety import open_own

__all__ = [
    "build_lock",
    "is_intact",
    "kernel_tuning_file",
    "layer_tuning_file",
    "put",
]

_POLL_SECONDS = 0.01


def is_intact(library: Path) -> bool:
    """Whether a library matches its seal, a file with its digest.

    Raises:
        UnsafeStore: it or its seal is a link or another user's, or others can write to it.
    """
    try:
        with open_own(_seal(library)) as file:
            digest = file.read()
        with open_own(library, in_reach=True) as file:
            return bool(digest == digest_of_open(file).encode())
    except FileNotFoundError:
        return False


def put(made: Path, library: Path) -> None:
    """Moves a built library into place, then seals it."""
    made.chmod(0o700)
    made.replace(library)
    sync_folder(library.parent)
    write_whole(_seal(library), digest_of(library).encode())


@contextlib.contextmanager
def build_lock(
    library: Path, seconds: float, when_waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Holds the lock of a library to be built.

    Args:
        library: its path.
        seconds: timeout.
        when_waiting: called once if another process holds the lock.

    Raises:
        StoreBusy: timeout.
    """
    path = library.with_suffix(".lock")
    lock, end, is_waiting = Lock(path), time.monotonic() + seconds, False
    try:
        while not lock.take():
            if time.monotonic() > end:
                raise StoreBusy(
                    f"{path} was locked for {seconds:g} s: wait, or take another folder"
                )
            if not is_waiting:
                when_waiting()
            is_waiting = True
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        lock.close()


def layer_tuning_file(library: Path) -> Path:
    """The file of `compiled_attn.ops.tuning.Tuning` next to a library."""
    return library.with_suffix(".layers.json")


def kernel_tuning_file(library: Path) -> Path:
    """The file of `compiled_attn.ops.cpu.kernel_tuning` next to a library."""
    return library.with_suffix(".kernel.json")


def _seal(library: Path) -> Path:
    return library.with_suffix(".sha256")
