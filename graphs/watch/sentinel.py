"""The sentinel: inside it, a compile is an error that names its cause, or is counted."""

from __future__ import annotations

import logging
from os import PathLike
from typing import Self

from graphs.watch.causes import CompileEvent
from graphs.watch.compiles import CompileWatch, late_error
from graphs.watch.late_file import LateFile
from graphs.watch.workers import WorkerWatch

__all__ = ["no_compile"]

_log = logging.getLogger(__name__)


class no_compile(CompileWatch):
    """Context manager under which every compile of torch is an error that names its cause.

        manager.warmup()
        with no_compile():
            serve()

    It counts first compiles and recompiles (also those of graph breaks), late compiles of a
    backward, late recordings of a CUDA graph, functions that run eagerly because their recompile
    limit is reached, Triton kernels, kernels for which this process starts a C++ or CUDA compiler,
    late calls of :func:`graphs.capture`, and graphs that XLA or Gaudi's bridge compiled. It does
    not see compilers that a library calls as a function (NVRTC, CuTe DSL's) or starts from C++,
    kernels built by processes that are not watched, and, unless `all_threads`, a backward in a
    thread of autograd, as on an accelerator.

    Args:
        strict: True raises :class:`GraphBudgetExceeded` before torch compiles anything, and for a
            Triton kernel before it runs; False lets it compile, counts it, and logs each cause once
            as a warning. What only counters or workers report is raised by :meth:`check` and at the
            end.
        all_threads: whether to watch all threads, or only the one that arms it.
        workers: True also watches processes that `multiprocessing` starts while it is armed; a
            :class:`WorkerWatch` those that were started inside that context. A strict sentinel
            raises in the worker, too.
        record: file to which late work is appended, once each, for :func:`graphs.warm_up_late`.

    Attributes:
        events: all events so far, also after the end.
        compiles, graph_breaks, late_captures, late_builds, limit_hits, device_compiles: how many of
            each. In strict mode the compile is the error, and its graph breaks are not counted.
        replays: number of replays of recorded graphs (CUDA's, Gaudi's, native ones on the CPU).

    Sentinels may be nested: each counts until a strict one raises. After `torch._dynamo.reset()` an
    armed one sees nothing, and logs that when it is disarmed.

    Raises:
        graphs.LateFileError: `record` is another file.
        OSError: `record` cannot be read or written.
        TypeError: `workers` is something else.
    """

    notes_captures = True

    def __init__(
        self,
        strict: bool = True,
        *,
        all_threads: bool = False,
        workers: bool | WorkerWatch = False,
        record: str | PathLike[str] | None = None,
    ) -> None:
        super().__init__(self._judge, all_threads=all_threads)
        if not isinstance(workers, (bool, WorkerWatch)):
            raise TypeError(
                f"workers: expected True, False or a WorkerWatch, got a {type(workers).__name__}"
            )
        self.strict = strict
        self._warned: set[tuple[str, str, int, str]] = set()
        self._own_workers = WorkerWatch() if workers is True else None
        self._workers = workers if isinstance(workers, WorkerWatch) else self._own_workers
        self._late = LateFile(record) if record is not None else None

    @property
    def late_captures(self) -> int:
        """Number of calls of :func:`graphs.capture`."""
        return self.count("capture")

    @property
    def late_builds(self) -> int:
        """Number of kernels built and CUDA graphs recorded outside of a compile."""
        return self.count("build", "triton build", "recording")

    @property
    def limit_hits(self) -> int:
        """How often torch refused to recompile a function."""
        return self.count("refused recompile")

    def arm(self) -> Self:
        """Start watching; returns itself."""
        self.start()
        return self

    def disarm(self) -> None:
        """Stop watching; does nothing if it is not armed.

        Raises:
            GraphBudgetExceeded: it is strict, and workers or counters report late work.
        """
        self.stop()

    def start(self) -> None:
        """Begin to watch.

        Raises:
            RuntimeError: it is armed already, or its :class:`WorkerWatch` has ended.
        """
        super().start()
        try:
            if self._own_workers is not None:
                self._own_workers.start()
            if self._workers is not None:
                self._workers.arm(self, self.strict)
                self.worker_folder = self._workers.folder
        except BaseException:
            super().stop()
            raise

    def stop(self) -> None:
        """Stop watching; as :meth:`disarm`."""
        try:
            super().stop()
        finally:
            if self._workers is not None:
                self._workers.disarm(self)
                self.worker_folder = None
            if self._own_workers is not None:
                self._own_workers.stop()

    def _collect(self) -> None:
        super()._collect()
        if self._workers is not None:
            self._found_later(self._workers.reported_to(self))

    def _judge(self, event: CompileEvent) -> None:
        if self._late is not None:
            self._late.append(event)
        if self.strict:
            raise late_error(event)
        cause = (event.kind, event.file, event.line, event.function)
        if cause not in self._warned:
            self._warned.add(cause)
            _log.warning("after warmup: %s; %s; more are counted only", event, event.remedy)
