"""Forked processes that compile some of the buckets into the compile cache on disk.

Tracing and lowering a graph is Python, which runs one thread at a time, so only other processes use
other cores. A worker is a copy of this process that compiles and runs nothing. If it fails, hangs
or dies, this process compiles its buckets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from typing import Self

import torch

from graphs.torch_internals.settings import use_one_compile_thread

__all__ = ["Workers", "one_thread", "why_no_workers"]

_log = logging.getLogger(__name__)

_PATIENCE = 30.0
_RECORD = struct.Struct("i")


def why_no_workers() -> str:
    """Why this process cannot fork workers, or an empty string."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return "this system has no safe fork"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return "CUDA is in use, which a fork does not survive"
    return ""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread.

    In a forked process more would hang: OpenMP does not know that its threads are gone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Workers:
    """Shares jobs with forked processes.

    Processes take jobs from a pipe, this one the first. Iteration yields the number of each job
    once: as soon as a worker has done it, or if no worker has taken it. Leaving the `with`
    statement kills the workers.

    Args:
        jobs: how many there are.
        count: how many processes to fork.
        work: does a job, in a worker.
        patience: seconds to wait for a worker when this process has nothing to do; None: half a
            minute, or as long as it has worked itself.
        until: latest end of a wait, on the clock of `time.monotonic`.
    """

    def __init__(
        self,
        jobs: int,
        count: int,
        work: Callable[[int], None],
        patience: float | None = None,
        until: float | None = None,
    ) -> None:
        self._jobs = jobs
        self._patience, self._until = patience, until
        self._count = max(0, min(count, jobs - 1))  # none is forked for nothing
        self._work = work
        self._pids: list[int] = []
        self._own: int | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self._queue, write_queue = _pipe(undo)
            self._done, write_done = _pipe(undo)
            for end in (self._queue, write_queue):
                os.set_blocking(end.fileno(), False)
            with contextlib.suppress(BlockingIOError):  # jobs that do not fit stay here
                for job in range(self._jobs):
                    os.write(write_queue.fileno(), _RECORD.pack(job))
            write_queue.close()
            self._own = _read(self._queue)
            self._began = time.monotonic()
            undo.callback(self._end)
            try:
                for _ in range(self._count):
                    self._pids.append(self._fork(write_done))
            except OSError as error:
                _log.warning("%d of %d workers: %s", len(self._pids), self._count, error)
            write_done.close()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def _end(self) -> None:
        for pid in self._pids:
            for kill in (os.killpg, os.kill):  # its compilers too; it may have no group yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def __iter__(self) -> Iterator[int]:
        left = dict.fromkeys(range(self._jobs))
        while left:
            job = self._next()
            if job is None:
                break
            if job in left:
                del left[job]
                yield job
        yield from left

    def _next(self) -> int | None:
        own, self._own = self._own, None
        if own is not None:
            return own
        if _is_ready(self._done, 0):
            if (job := _read(self._done)) is not None:
                return job
            return _read(self._queue)  # all workers are gone
        if (job := _read(self._queue)) is not None:
            return job
        if not _is_ready(self._done, self._wait()):
            return None
        return _read(self._done)

    def _wait(self) -> float:
        now, patience = time.monotonic(), self._patience
        if patience is None:
            patience = max(_PATIENCE, now - self._began)
        return patience if self._until is None else max(0.0, min(patience, self._until - now))

    def _fork(self, write_done: FileIO) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:  # in the worker, which must never return
            os.setpgrp()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            # Inductor's compile processes belong to the parent.
            use_one_compile_thread()
            while (job := _read(self._queue)) is not None:
                with contextlib.suppress(Exception):
                    self._work(job)
                os.write(write_done.fileno(), _RECORD.pack(job))
        finally:
            os._exit(0)


def _pipe(undo: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    read, write = os.pipe()
    return undo.enter_context(FileIO(read)), undo.enter_context(FileIO(write, "w"))


def _is_ready(pipe: FileIO, seconds: float) -> bool:
    poll = select.poll()  # select() takes no descriptors above 1023
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _read(pipe: FileIO) -> int | None:
    try:
        record = os.read(pipe.fileno(), _RECORD.size)
    except BlockingIOError:
        return None
    return int(_RECORD.unpack(record)[0]) if len(record) == _RECORD.size else None
