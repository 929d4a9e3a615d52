"""Sentinels in worker processes, which report to the parent through files in a private folder.

A process that `multiprocessing` starts (fork, spawn, forkserver) gets an instance attribute `run`
that arms a watch around the class's `run`. Nothing is judged in it before a sentinel of the parent
is armed; then each late compile is one line of JSON in the worker's own file, so that what a killed
worker wrote can still be read.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self, TypeAlias

from graphs.watch.causes import CompileEvent
from graphs.watch.compiles import CompileWatch, forget_inherited, late_error

__all__ = ["WorkerWatch"]

_log = logging.getLogger(__name__)

_ARMED = "armed-"
_ENDING = ".jsonl"
_Start: TypeAlias = Callable[[BaseProcess], None]
# Replaced as a whole. While it is not empty, `_replaced` is what BaseProcess.start was replaced by,
# and what it was.
_open: tuple[WorkerWatch, ...] = ()
_replaced: tuple[_Start, _Start] | None = None
_changing = threading.RLock()


class WorkerWatch:
    """Lets a :class:`no_compile` see the processes that are started inside this context.

        with WorkerWatch() as workers:
            engine = start_workers_and_warm_up()
            with no_compile(workers=workers):
                engine.serve()

    It covers every process of `multiprocessing` (Process, Pool, ProcessPoolExecutor,
    torch.multiprocessing, DataLoader workers), and those that these start, also if they end or are
    killed early. It does not cover programs that are started otherwise (`subprocess`, torchrun,
    Ray): these enter `no_compile` themselves. Graphs of XLA or Gaudi are reported when a worker
    ends, to sentinels that were armed when it started.
    """

    def __init__(self) -> None:
        self.folder = ""
        self._is_own = True
        self._started: dict[int, str] = {}
        self._read: dict[tuple[object, str], int] = {}
        self._armed: dict[object, str] = {}

    def start(self) -> None:
        """Begin to watch processes that start from now on.

        Raises:
            RuntimeError: it is started already.
        """
        if self.folder:
            raise RuntimeError("this WorkerWatch is started already: make a second one")
        self._is_own = True
        self.folder = tempfile.mkdtemp(prefix="graphs-workers-")
        self._register()

    def stop(self) -> None:
        """Stop watching, and remove the reports. Workers that still run report nothing any more."""
        global _open, _replaced
        with _changing:
            _open = tuple(each for each in _open if each is not self)
            if not _open and _replaced is not None:
                if BaseProcess.start is _replaced[0]:  # else it is in the chain of another one
                    BaseProcess.start = _replaced[1]  # type: ignore[method-assign, assignment]
                _replaced = None
        if self._is_own and self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = ""
        self._started.clear()
        self._read.clear()
        self._armed.clear()

    @property
    def processes(self) -> dict[int, str]:
        """Names of the processes that report, by process id."""
        reports = {path.stem: _lines(path, 0)[0] for path in self._reports()}
        return {int(pid): lines[0]["name"] for pid, lines in reports.items() if lines}

    def arm(self, sentinel: object, strict: bool) -> None:
        """Let workers report to a sentinel from now on.

        Raises:
            RuntimeError: it is not started.
        """
        if not self.folder:
            raise RuntimeError(
                "the WorkerWatch is not started: enter it before the workers start, and arm "
                "no_compile(workers=...) inside it"
            )
        token = secrets.token_hex(8)
        (Path(self.folder) / f"{_ARMED}{token}").write_text("strict" if strict else "count")
        self._armed[sentinel] = token

    def disarm(self, sentinel: object) -> None:
        """Let workers no longer report to a sentinel."""
        token = self._armed.pop(sentinel, "")
        if token and self.folder:
            (Path(self.folder) / f"{_ARMED}{token}").unlink(missing_ok=True)
            silent = self._started.keys() - self.processes.keys()
            names = ", ".join(f"{self._started.pop(pid)} (process {pid})" for pid in sorted(silent))
            if names:
                _log.warning("not watched, or ended before its work began: %s", names)

    def reported_to(self, sentinel: object) -> list[CompileEvent]:
        """Events that workers reported to an armed sentinel since the last call."""
        token, found = self._armed.get(sentinel), []
        if token is None:
            return []
        for path in self._reports():
            at = sentinel, path.name
            lines, self._read[at] = _lines(path, self._read.get(at, 0))
            found += [
                CompileEvent(**each["event"]) for each in lines if token in each.get("to", ())
            ]
        return found

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _reports(self) -> list[Path]:
        return sorted(Path(self.folder).glob(f"*{_ENDING}")) if self.folder else []

    @contextmanager
    def _joined(self, folder: str) -> Iterator[None]:
        # In a worker: processes that it starts report to the same folder.
        self.folder, self._is_own = folder, False
        self._register()
        try:
            yield
        finally:
            self.stop()

    def _register(self) -> None:
        global _open, _replaced
        with _changing:
            if _replaced is None:
                before = BaseProcess.start
                BaseProcess.start = _start_watched(before)  # type: ignore[method-assign, assignment]
                _replaced = BaseProcess.start, before
            _open = (*_open, self)


def _start_watched(start_process: _Start) -> _Start:
    def start(self: BaseProcess) -> None:
        watches = _open if _replaced is not None and _replaced[0] is start else ()
        if not watches:
            start_process(self)
            return
        before = vars(self).get("run")
        vars(self)["run"] = _WatchedRun(self, before, [watch.folder for watch in watches])
        try:
            start_process(self)
        finally:
            del vars(self)["run"]
            if before is not None:
                vars(self)["run"] = before
        for watch in watches:
            watch._started[self.pid or 0] = self.name

    return start


class _WatchedRun:
    """Runs a process under a watch; pickled with the process where it is spawned."""

    def __init__(
        self, process: BaseProcess, run: Callable[[], None] | None, folders: list[str]
    ) -> None:
        self._process, self._run, self._folders = process, run, folders

    def __call__(self) -> None:
        global _open, _changing
        _open, _changing = (), threading.RLock()  # of the parent, where this process was forked
        with ExitStack() as stack:
            for folder in self._folders:
                forget_inherited(folder)
                if os.path.isdir(folder):  # else the parent's watch has ended
                    stack.enter_context(_InWorker(folder, self._process.name))
                    stack.enter_context(WorkerWatch()._joined(folder))
            (self._run or partial(type(self._process).run, self._process))()


class _InWorker(CompileWatch):
    """The watch of a worker: asks at each event who is armed, reports, and raises if strict."""

    notes_captures = True

    def __init__(self, folder: str, name: str) -> None:
        super().__init__(self._judge)
        self.worker_folder = folder
        self._name = f"{name} (process {os.getpid()})"
        self._path = Path(folder) / f"{os.getpid()}{_ENDING}"
        self._from_start = self._armed().keys()
        self._write({"name": name})

    def check(self) -> None:
        """Report what only counters showed; nothing is raised at the end of a worker."""
        self._collect()
        found, self._unchecked = self._unchecked, []
        for event in found:  # for others it may be from before they were armed
            self._report(event, [*(self._armed().keys() & self._from_start)])

    def _judge(self, event: CompileEvent) -> None:
        armed = self._armed()
        event = self._report(event, [*armed])
        if "strict" in armed.values():
            raise late_error(event)

    def _report(self, event: CompileEvent, tokens: list[str]) -> CompileEvent:
        event = replace(event, worker=self._name)
        if tokens:
            self._write({"to": tokens, "event": asdict(event)})
        return event

    def _armed(self) -> dict[str, str]:
        """Whether each sentinel that is armed now is strict, by its token."""
        armed: dict[str, str] = {}
        for path in self._path.parent.glob(f"{_ARMED}*"):
            with suppress(OSError):  # disarmed just now
                armed[path.name.removeprefix(_ARMED)] = path.read_text()
        return armed

    def _write(self, line: dict[str, Any]) -> None:
        # One write of a whole line; a worker never fails for its report.
        with suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def _lines(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """Whole lines of a report from an offset, and the offset after them."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)
