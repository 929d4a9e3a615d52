"""The folder of built libraries: which are whole, whose turn it is to build, what nobody uses."""

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

__all__ = ["forms_of", "is_whole", "put", "remove_unused", "tuning_of", "turn"]

_NAME = re.compile(rf"({'|'.join(ISAS)})-[0-9a-f]{{32}}")
_REST = re.compile(rf"\.({_NAME.pattern})\.")
_UNUSED_SECONDS = 30 * 24 * 3600.0
_POLL_SECONDS = 0.01


def is_whole(library: Path) -> bool:
    """Whether a library is what was built: its seal has its digest. Notes the use on the seal.

    Raises:
        UnsafeStore: it or its seal is a link or another user's, or others can write to it.
    """
    seal = _seal(library)
    try:
        with open_own(seal) as file:
            told = file.read()
        with open_own(library, in_reach=True) as file:
            if told != digest_of_open(file).encode():
                return False
        _touch(seal)
    except FileNotFoundError:
        return False
    return True


def put(made: Path, library: Path) -> None:
    """Moves a built library to its place and seals it, in that order."""
    made.chmod(0o700)
    made.replace(library)
    sync_folder(library.parent)
    write_whole(_seal(library), digest_of(library).encode())


@contextlib.contextmanager
def turn(
    library: Path, seconds: float, when_waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Holds the right to build a library, alone of all processes.

    Args:
        library: to be built.
        seconds: to wait at most.
        when_waiting: called once if another process has the right.

    Raises:
        StoreBusy: others held it for all of `seconds`.
    """
    path = _lock(library)
    lock, end, waits = Lock(path), time.monotonic() + seconds, False
    try:
        while not (lock.take() and lock.is_current()):
            if not lock.is_current():  # removed with a library that nobody used, while we waited
                lock.close()
                lock = Lock(path)
            elif time.monotonic() > end:
                raise StoreBusy(
                    f"{path} was locked for {seconds:g} s: wait, or take another folder"
                )
            else:
                if not waits:
                    when_waiting()
                waits = True
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        lock.close()


def remove_unused(folder: Path) -> None:
    """Removes the libraries that no process took for 30 days, with their seals and locks.

    And what builds left behind that were killed.
    """
    # The folder may be one that holds other things too.
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
            known = tuning_of(library), forms_of(library)
            locks = (each.with_suffix(".lock") for each in known)
            for path in (_seal(library), library, *known, *locks, _lock(library)):
                remove(path)
    finally:
        lock.close()


def _remove_rest(rest: Path, library: Path) -> None:
    lock = Lock(_lock(library))
    try:
        if lock.take():  # or else it is being built
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
        return  # a folder that is only read serves too


def tuning_of(library: Path) -> Path:
    """Where stands which layers are faster by a library."""
    return library.with_suffix(".tuning.json")


def forms_of(library: Path) -> Path:
    """Where stands in which forms a library is fastest."""
    return library.with_suffix(".forms.json")


def _seal(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _lock(library: Path) -> Path:
    return library.with_suffix(".lock")
