"""The cache of built libraries: integrity and build locks."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from graphs.files import digest_of, digest_of_open, remove, sync_folder, write_whole
from graphs.store.cache_folder import cache_folder
from graphs.store.lock import Lock, locked
from graphs.store.safety import open_own, refuse_unsafe

__all__ = [
    "build_lock", "cache_library", "default_folder", "is_intact", "kernel_tuning_file",
    "layer_tuning_file", "own_folder", "put",
]  # fmt: skip


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
    """Holds the lock of a library to be built; calls ``when_waiting`` if another process has it.

    Raises:
        StoreBusy: timeout.
    """
    path = library.with_suffix(".lock")
    with contextlib.closing(Lock(path)) as lock, contextlib.ExitStack() as stack:
        if not lock.take():
            when_waiting()
            stack.enter_context(locked(path, shared=False, seconds=seconds))
        yield


def cache_library(
    library: Path,
    make: Callable[[Path], Path],
    seconds: float,
    when_waiting: Callable[[], None] = lambda: None,
) -> bool:
    """Makes a library unless it is cached; returns whether it was made.

    Args:
        library: its path.
        make: makes it in a folder, and returns its path there.
        seconds, when_waiting: see `build_lock`.
    """
    if is_intact(library):
        return False
    with build_lock(library, seconds, when_waiting):
        if is_intact(library):  # another process made it while this one waited
            return False
        for rest in library.parent.glob(f".{library.stem}.*"):  # left by interrupted builds
            remove(rest)
        work = Path(tempfile.mkdtemp(prefix=f".{library.stem}.", dir=library.parent))
        try:
            put(make(work), library)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return True


def own_folder(folder: Path | None) -> Path:
    """Returns a cache of libraries that only this user can write to; None: `default_folder`.

    Raises:
        StoreError, OSError: there is none.
    """
    folder = folder or default_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_unsafe(folder.resolve())
    return folder.resolve()


def default_folder() -> Path:
    """The default cache of libraries.

    Raises:
        StoreError: the user has no home directory.
    """
    return cache_folder("compiled-attn-kernels")


def layer_tuning_file(library: Path) -> Path:
    """The file of `compiled_attn.ops.tuning.Tuning` next to a library."""
    return library.with_suffix(".layers.json")


def kernel_tuning_file(library: Path) -> Path:
    """The file of `compiled_attn.ops.cpu.kernel_tuning` next to a library."""
    return library.with_suffix(".kernel.json")


def _seal(library: Path) -> Path:
    return library.with_suffix(".sha256")
