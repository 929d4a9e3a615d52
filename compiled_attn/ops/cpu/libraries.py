"""The cache of built libraries: integrity, build locks, removal of unused ones."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from compiled_attn.ops.cpu.isa import ISAS
from graphs.errors import StoreBusy
from graphs.files import digest_of, digest_of_open, remove, sync_folder, write_whole
from graphs.store.lock import Lock
from graphs.store.safety import open_own

__all__ = [
    "build_lock",
    "is_intact",
    "kernel_tuning_file",
    "layer_tuning_file",
    "put",
    "remove_unused",
]

_NAME = re.compile(rf"({'|'.join(ISAS)})-[0-9a-f]{{32}}")
_REST = re.compile(rf"\.({_NAME.pattern})\.")
_UNUSED_SECONDS = 30 * 24 * 3600.0
_POLL_SECONDS = 0.01


def is_intact(library: Path) -> bool:
    """Whether a library matches its seal, a file with its digest. Marks it as used.

    Raises:
        UnsafeStore: it or its seal is a link or another user's, or others can write to it.
    """
    seal = _seal(library)
    try:
        with open_own(seal) as file:
            digest = file.read()
        with open_own(library, in_reach=True) as file:
            if digest != digest_of_open(file).encode():
                return False
        _touch(seal)
    except FileNotFoundError:
        return False
    return True


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
    path = _lock(library)
    lock, end, is_waiting = Lock(path), time.monotonic() + seconds, False
    try:
        while not (lock.take() and lock.is_current()):
            if not lock.is_current():  # removed with an unused library while we waited
                lock.close()
                lock = Lock(path)
            elif time.monotonic() > end:
                raise StoreBusy(
                    f"{path} was locked for {seconds:g} s: wait, or take another folder"
                )
            else:
                if not is_waiting:
                    when_waiting()
                is_waiting = True
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        lock.close()


def remove_unused(folder: Path) -> None:
    """Removes libraries unused for 30 days, and leftovers of interrupted builds."""
    # The folder may hold other files too.
    for seal in folder.glob("*.sha256"):
        if _NAME.fullmatch(seal.stem) and _is_unused(seal):
            with contextlib.suppress(OSError):
                _remove(seal.with_suffix(".so"))
    for rest in folder.glob(".*.*"):
        if found := _REST.match(rest.name):
            with contextlib.suppress(OSError):
                _remove_rest(rest, folder / f"{found[1]}.so")


def _remove(library: Path) -> None:
    lock = Lock(_lock(library))
    try:
        if lock.take() and _is_unused(_seal(library)):
            tunings = layer_tuning_file(library), kernel_tuning_file(library)
            locks = (each.with_suffix(".lock") for each in tunings)
            for path in (_seal(library), library, *tunings, *locks, _lock(library)):
                remove(path)
    finally:
        lock.close()


def _remove_rest(rest: Path, library: Path) -> None:
    lock = Lock(_lock(library))
    try:
        if lock.take():  # else it is being built
            remove(rest)
            if not library.exists():
                remove(lock.path)
    finally:
        lock.close()


def _is_unused(seal: Path) -> bool:
    try:
        return time.time() - seal.stat().st_mtime > _UNUSED_SECONDS
    except FileNotFoundError:
        return False


def _touch(seal: Path) -> None:
    try:
        os.utime(seal)
    except FileNotFoundError:  # another process just removed it
        raise
    except OSError:
        return  # read-only folders must work too


def layer_tuning_file(library: Path) -> Path:
    """The file of `compiled_attn.ops.tuning.Tuning` next to a library."""
    return library.with_suffix(".layers.json")


def kernel_tuning_file(library: Path) -> Path:
    """The file of `compiled_attn.ops.cpu.kernel_tuning` next to a library."""
    return library.with_suffix(".kernel.json")


def _seal(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _lock(library: Path) -> Path:
    return library.with_suffix(".lock")
