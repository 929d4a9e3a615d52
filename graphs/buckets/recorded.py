"""Counts of the sizes that were needed, in a file which several processes may write.

One JSON object a line, older needs first; the planner reads it as a demand::

    {"need": {"tokens": 37, "requests": 4}, "count": 120, "window": 1}

Sizes and counts only: nothing of what the inputs contained.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeAlias

from graphs.errors import BucketFileError, StoreBusy, clipped, parse_json, quoted
from graphs.files import open_regular, write_whole

__all__ = ["Counts", "RecordedSizes"]

_log = logging.getLogger(__name__)

Counts: TypeAlias = "dict[tuple[int, ...], int]"
"""How often sizes were needed, by their values in the order of the axes."""

_CHECK_EVERY = 256  # needs
_MOST_BYTES = 64 << 20
_MOST_COUNT = 2**53
_LOCK_SECONDS = 10.0
_ROW = '{"need": {"rows": 3}, "count": 2, "window": 1}'


class RecordedSizes:
    """Counts needed sizes in memory, and adds the counts to a file from time to time.

    `add` costs a dictionary update; a thread writes. The file has two windows: needs are counted in
    the newer one, and when that is full it replaces the older one. So the counts follow traffic
    that drifts, and the file stays small. What a killed process has not yet written is lost; the
    file itself is replaced as a whole. `close`, or the end of the process, writes the rest.

    Args:
        path: the file, created by the first write; its counts are read now.
        names: axes of the sizes.
        window: needs in a window at most, give or take those of one write.
        most: distinct sizes in a window at most, likewise.
        seconds: between two writes.

    Raises:
        BucketFileError: the file is something else, has other axes, or its folder does not exist.
            It is not changed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        names: Sequence[str],
        *,
        window: int = 100_000,
        most: int = 4096,
        seconds: float = 60.0,
    ) -> None:
        self.path, self.names = Path(path), tuple(names)
        if not self.path.parent.is_dir():
            raise BucketFileError(
                f"{self.path}: expected a file in an existing folder: create {self.path.parent}"
            )
        self._window, self._most, self._seconds = window, most, seconds
        self._older, self._newer = _read(self.path, self.names)
        self._pending: Counts = {}
        self._until_check = 1  # the first need registers the write at exit
        self._due = time.monotonic() + seconds
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_warned = False
        self._is_at_exit = False
        self._process = os.getpid()
        # Not at the top: its package imports every backend. Not in `write`: at exit it is too late.
        from graphs.store.lock import locked, why_no_locks

        lock = self.path.with_name(f".{self.path.name}.lock")
        held = partial(locked, lock, shared=False, seconds=_LOCK_SECONDS)
        self._locked: Callable[[], AbstractContextManager[None]] = (
            nullcontext if why_no_locks() else held
        )

    @property
    def counts(self) -> Counts:
        """Counts of both windows, and of what is not written yet."""
        found = dict(self._older)
        _add(found, self._newer)
        _add(found, self._pending.copy())
        return found

    def add(self, sizes: tuple[int, ...]) -> None:
        """Count a need, given by its sizes in the order of `names`."""
        pending = self._pending
        pending[sizes] = pending.get(sizes, 0) + 1
        self._until_check -= 1
        if self._until_check <= 0:
            self._check()

    def write(self) -> None:
        """Add what was counted since the last write to the file, atomically.

        Raises:
            OSError: the file cannot be read or written.
            BucketFileError: it has become something else.
            StoreBusy: another process has had it locked for ten seconds.

        After an error the file is unchanged and the counts wait for the next write.
        """
        with self._writing:
            # `add` may still hold the old dictionary: a copy is not changed while it is read.
            taken, self._pending = self._pending, {}
            taken = taken.copy()
            if os.getpid() != self._process:  # forked: the parent writes what it counted
                self._process, taken = os.getpid(), {}
            if not taken:
                return
            try:
                with self._locked():
                    older, newer = _read(self.path, self.names)
                    _add(newer, taken)
                    if sum(newer.values()) >= self._window or len(newer) >= self._most:
                        older, newer = newer, {}
                    write_whole(self.path, _text(self.names, (older, newer)))
            except BaseException:
                if len(self._pending) < self._most:
                    _add(self._pending, taken)
                raise
            self._older, self._newer = older, newer

    def close(self) -> None:
        """Write the rest; a file that cannot be written is a warning in the log."""
        if (thread := self._thread) is not None:
            thread.join()
        self._write_or_warn()
        atexit.unregister(self.close)
        self._is_at_exit = False

    def _check(self) -> None:
        self._until_check = _CHECK_EVERY
        if not self._is_at_exit:
            self._is_at_exit = True
            atexit.register(self.close)
        now = time.monotonic()
        if now < self._due and len(self._pending) < self._most:
            return
        self._due = now + self._seconds
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write_or_warn, daemon=True)
            self._thread.start()

    def _write_or_warn(self) -> None:
        try:
            self.write()
        except (OSError, ValueError, StoreBusy) as error:  # it must not stop what is served
            if not self._has_warned:
                _log.warning("sizes are not recorded: %s", error)
            self._has_warned = True
        else:
            self._has_warned = False


def _add(counts: Counts, more: Mapping[tuple[int, ...], int]) -> None:
    for sizes, count in more.items():
        counts[sizes] = min(counts.get(sizes, 0) + count, _MOST_COUNT)


def _text(names: Sequence[str], windows: Iterable[Counts]) -> bytes:
    rows = (
        {"need": dict(zip(names, map(int, sizes), strict=True)), "count": count, "window": window}
        for window, counts in enumerate(windows)
        for sizes, count in counts.items()
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _read(path: Path, names: tuple[str, ...]) -> tuple[Counts, Counts]:
    """The older and the newer window of a file; empty if it does not exist."""
    windows: tuple[Counts, Counts] = ({}, {})
    try:
        with open_regular(path) as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return windows
    except (OSError, ValueError) as error:
        raise BucketFileError(f"{path}: not readable as recorded sizes: {error}") from error
    if len(data) > _MOST_BYTES:
        raise BucketFileError(
            f"{path}: expected recorded sizes of at most {_MOST_BYTES:,} bytes: name another file"
        )
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            _read_row(line, names, windows)
        except ValueError as error:
            problem = clipped(str(error), 300)
            raise BucketFileError(
                f"{path}:{number}: {problem}: name another file, or remove it"
            ) from None
    return windows


def _read_row(line: bytes, names: tuple[str, ...], windows: tuple[Counts, Counts]) -> None:
    row = parse_json(line)
    match row:
        case {"need": dict(need), "count": int(count), "window": 0 | 1 as window}:
            pass
        case _:
            raise ValueError(f"expected recorded sizes such as {_ROW}, got {quoted(row)}")
    if set(need) != set(names):
        raise ValueError(f"expected sizes of {', '.join(names)}, got {quoted(', '.join(need))}")
    sizes = tuple(need[name] for name in names)
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"expected whole sizes of at least 0, got {quoted(need)}")
    if isinstance(count, bool) or not 1 <= count <= _MOST_COUNT:
        raise ValueError(f"expected a count of at least 1, got {quoted(count)}")
    _add(windows[window], {sizes: count})
