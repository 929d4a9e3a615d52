"""The sentinel: a compile after warmup is an error that names its cause, or a counted warning."""

from __future__ import annotations

import logging
from typing import Self

from graphs.errors import GraphBudgetExceeded
from graphs.torch_internals.events import interrupts_dynamo
from graphs.watch.causes import CompileEvent, CompileSite, event_at
from graphs.watch.compiles import CompileWatch, watching

__all__ = ["no_compile", "note_capture"]

_log = logging.getLogger(__name__)


class no_compile(CompileWatch):
    """Context manager under which every compile of torch is an error that names its cause.

        manager.warmup()
        with no_compile():
            serve()

    It counts first compiles and recompiles (also those of graph breaks), late compiles of a
    backward, late recordings of a CUDA graph, functions that run eagerly because their recompile
    limit is reached, kernels for which this process starts a C++ or CUDA compiler, and late calls
    of :func:`graphs.capture`. It does not see kernels that a library builds itself (Triton's),
    kernels built by another process, and, unless `all_threads`, a backward in a thread of autograd,
    as on an accelerator.

    Args:
        strict: True raises :class:`GraphBudgetExceeded` before anything is compiled; False lets it
            compile, counts it, and logs each cause once as a warning.
        all_threads: whether to watch all threads, or only the one that arms it.

    Attributes:
        events: all events so far, also after the end.
        compiles, graph_breaks, late_captures, late_builds, limit_hits: how many of each. In strict
            mode the compile is the error, and its graph breaks are not counted.
        replays: number of replays of recorded graphs (CUDA's, Gaudi's, native ones on the CPU).

    Sentinels may be nested: each counts until a strict one raises. After `torch._dynamo.reset()` an
    armed one sees nothing, and logs that when it is disarmed.
    """

    def __init__(self, strict: bool = True, *, all_threads: bool = False) -> None:
        super().__init__(self._judge, all_threads=all_threads)
        self.strict = strict
        self._warned: set[tuple[str, str, int, str]] = set()

    @property
    def late_captures(self) -> int:
        """Number of calls of :func:`graphs.capture`."""
        return self.count("capture")

    @property
    def late_builds(self) -> int:
        """Number of kernels built and CUDA graphs recorded outside of a compile."""
        return self.count("build", "recording")

    @property
    def limit_hits(self) -> int:
        """How often torch refused to recompile a function."""
        return self.count("refused recompile")

    def arm(self) -> Self:
        """Start watching; returns itself."""
        self.start()
        return self

    def disarm(self) -> None:
        """Stop watching; does nothing if it is not armed."""
        self.stop()

    def _judge(self, event: CompileEvent) -> None:
        if self.strict:
            raise _passing_through_dynamo(event)
        cause = (event.kind, event.file, event.line, event.function)
        if cause not in self._warned:
            self._warned.add(cause)
            _log.warning("after warmup: %s; %s; more are counted only", event, event.remedy)


def note_capture(name: str) -> None:
    """Report a late capture to every armed sentinel.

    Raises:
        GraphBudgetExceeded: a strict sentinel is armed.
    """
    for watch in watching():
        if isinstance(watch, no_compile):
            watch.note(event_at("capture", CompileSite(name)))


def _passing_through_dynamo(event: CompileEvent) -> GraphBudgetExceeded:
    # Dynamo wraps what its callbacks raise in an internal error, except its own exceptions.
    if event.kind in ("build", "capture"):
        return GraphBudgetExceeded(event)
    return interrupts_dynamo(GraphBudgetExceeded)(event)  # type: ignore[return-value]
