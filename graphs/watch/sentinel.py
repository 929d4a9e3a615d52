"""The sentinel: what compiles after warmup is an error with its cause, or a counted warning."""

from __future__ import annotations

import logging
from typing import Self

from graphs.errors import GraphBudgetExceeded
from graphs.torch_internals.events import interrupts_dynamo
from graphs.watch.causes import CompileSite
from graphs.watch.compiles import CompileWatch, watching
from graphs.watch.events import CompileEvent, event_at

__all__ = ["no_compile", "note_capture"]

_log = logging.getLogger(__name__)


class no_compile(CompileWatch):
    """Context manager under which every compile of torch is an error that names its cause.

    Caught are the first compile of a function, a recompile (new shape, dtype, stride, device, grad
    or inference mode, thread count, default dtype, changed global or attribute), graph breaks (each
    of which compiles), a backward that is compiled late, a CUDA graph that is recorded late, a
    function that runs eagerly because its recompile limit is reached, a kernel for which this
    process starts a C++ or CUDA compiler, and a late :func:`graphs.capture`. Watched is the thread
    that arms it: others may warm up and compile meanwhile. Kernels that are built inside a library
    (Triton's), or by another process, are not seen, nor is a backward that autograd runs in a
    thread of its own (as it does on an accelerator), unless `all_threads`.

        manager.warmup()
        with no_compile():
            serve()

    Args:
        strict: True raises :class:`GraphBudgetExceeded` before anything is compiled; False lets it
            compile, counts it, and logs each cause once as a warning.
        all_threads: whether what other threads compile, build and capture counts too.

    Attributes:
        events: everything seen so far, also after the end.
        compiles, graph_breaks, late_captures, late_builds, limit_hits: how many of each. Graph
            breaks are found while compiling, so in strict mode the compile is the error, and its
            breaks stay uncounted.
        replays: how many recorded graphs (CUDA's, Gaudi's, native ones of the CPU) ran again.

    May be nested: each counts what it sees until a strict one raises. `torch._dynamo.reset()`
    blinds an armed one, which then says so at the end. After an exception or Ctrl-C at any line of
    arming or disarming, :meth:`disarm` leaves nothing behind.
    """

    def __init__(self, strict: bool = True, *, all_threads: bool = False) -> None:
        super().__init__(self._judge, all_threads=all_threads)
        self.strict = strict
        self._warned: set[tuple[str, str, int, str]] = set()

    @property
    def late_captures(self) -> int:
        """How many times :func:`graphs.capture` was called."""
        return self.count("capture")

    @property
    def late_builds(self) -> int:
        """How many kernels were built and CUDA graphs recorded, outside of a compile."""
        return self.count("build", "recording")

    @property
    def limit_hits(self) -> int:
        """How many times torch refused to compile a function yet again."""
        return self.count("refused recompile")

    def arm(self) -> Self:
        """As :meth:`start`; returns itself."""
        self.start()
        return self

    def disarm(self) -> None:
        """As :meth:`stop`: leaves nothing behind, also if it is armed in part or not at all."""
        self.stop()

    def _judge(self, event: CompileEvent) -> None:
        if self.strict:
            raise _passing_through_dynamo(event)
        cause = (event.kind, event.file, event.line, event.function)
        if cause not in self._warned:
            self._warned.add(cause)
            _log.warning("after warmup: %s; %s; more are counted only", event, event.remedy)


def note_capture(name: str) -> None:
    """Tell every armed sentinel that a graph is about to be captured.

    Raises:
        GraphBudgetExceeded: a strict one is armed.
    """
    for watch in watching():
        if isinstance(watch, no_compile):
            watch.note(event_at("capture", CompileSite(name)))


def _passing_through_dynamo(event: CompileEvent) -> GraphBudgetExceeded:
    # Dynamo wraps what its callbacks raise in an internal error, except for its own kinds of
    # exception.
    if event.kind in ("build", "capture"):
        return GraphBudgetExceeded(event)
    return interrupts_dynamo(GraphBudgetExceeded)(event)  # type: ignore[return-value]
