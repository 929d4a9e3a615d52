"""A watch over what one thread, or all of them, compile, record and build."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from graphs.capture.wrappers import with_own_code
from graphs.watch import hooks
from graphs.watch.causes import CompileSite, site_of_stack

__all__ = ["CompileEvent", "CompileWatch"]

Kind: TypeAlias = Literal[
    "compile",
    "recompile",
    "refused recompile",
    "backward",
    "recording",
    "build",
    "capture",
]

REMEDIES: dict[Kind, str] = {
    "compile": "call it once in the warmup, or capture it with graphs.capture",
    "recompile": "capture this case in the warmup",
    "refused recompile": "capture this case in the warmup",
    "backward": "run its backward in the warmup too, or serve under torch.no_grad()",
    "recording": "run this case twice in the warmup, where its graph is recorded",
    "build": "build it before serving, by running it once in the warmup",
    "capture": "capture this case in the warmup",
}
_TRIGGERS: dict[str, Kind] = {"LAZY_BACKWARD": "backward", "CUDAGRAPH_RECORDING": "recording"}


@dataclass(frozen=True)
class CompileEvent:
    """One compile, or what stands for one.

    Attributes:
        kind: `compile` of a new function; `recompile` after a guard failed; `refused recompile`,
            where a function had used up its recompiles, so that torch runs it eagerly or raises;
            `backward`, of a gradient, which torch compiles when it is first needed; `recording`, of
            a CUDA graph; `build`, of a kernel by a C++ or CUDA compiler outside of any compile;
            `capture`, a late :func:`graphs.capture`.
        function: its name, or the name of the captured graph, or what is built.
        file, line: where the function is, empty and 0 if unknown.
        reason: the guard or tensor that caused it, empty for a first compile.
        thread: identifier of the compiling thread.
        remedy: what to do about it.
    """

    kind: Kind
    function: str
    file: str
    line: int
    reason: str
    thread: int
    remedy: str = ""

    def __str__(self) -> str:
        place = f" ({self.file}:{self.line})" if self.file else ""
        return f"{self.kind} of {self.function}{place}" + (
            f": {self.reason}" if self.reason else ""
        )


class CompileWatch:
    """Collects the compiles between :meth:`start` and :meth:`stop`, or inside a `with` statement.

    Args:
        on_event: called with each event before torch compiles; what it raises reaches the caller of
            the function.
        all_threads: whether all of the process is watched, or only the thread that starts the
            watch. Work that a compile hands to threads and processes of torch is part of it.

    Attributes:
        events: the events so far.
        graphs: how many graphs Dynamo made; fewer than compiles, where a function had no operator.
        graph_breaks: how many graph breaks the compiles met.

    Torch compiles in one thread at a time. A compile inside another compile is not seen apart, nor
    is one that begins while another thread compiles a backward or records a CUDA graph of torch's.
    `torch._dynamo.reset()` removes the callbacks: then `lost` is true. After an interruption at any
    moment :meth:`stop` leaves nothing behind.
    """

    def __init__(
        self,
        on_event: Callable[[CompileEvent], None] | None = None,
        *,
        all_threads: bool = True,
    ) -> None:
        self.events: list[CompileEvent] = []
        self.graphs = 0
        self.graph_breaks = 0
        self._on_event = on_event
        self._all_threads = all_threads
        self._thread = 0
        self._before = (0, 0)
        self._is_compiling = False
        self._ears = hooks.Listener(self._started, self._ended, self._limit_hit, self._built)

    @property
    def compiles(self) -> int:
        """How many compiles began."""
        return sum(event.kind in ("compile", "recompile", "backward") for event in self.events)

    @property
    def lost(self) -> bool:
        """Whether `torch._dynamo.reset()` has blinded a started watch."""
        return hooks.is_deaf(self._ears)

    def start(self) -> None:
        """Begin to see compiles."""
        self._thread = threading.get_ident()
        hooks.listen(self._ears)

    def stop(self) -> None:
        """Stop seeing compiles, leaving nothing behind in torch. May be called twice."""
        hooks.unlisten(self._ears)
        self._is_compiling = False

    def note(self, event: CompileEvent) -> None:
        """Take an event that torch does not know of."""
        if self._watches(event.thread):
            self.events.append(event)
            if self._on_event is not None:
                self._on_event(event)

    def __enter__(self) -> CompileWatch:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.stop()
        except BaseException:
            self.stop()
            raise

    def _watches(self, thread: int) -> bool:
        return self._all_threads or thread == self._thread

    def _started(self, trigger: str) -> None:
        if not self._watches(threading.get_ident()):
            return
        self._before = _graphs_and_breaks()
        site = site_of_stack()
        if trigger == "DYNAMO":
            self.note(_event("recompile" if site and site.reason else "compile", site))
        else:
            self.note(_event(_TRIGGERS.get(trigger, "build"), site))
        self._is_compiling = True

    def _ended(self) -> None:
        self._is_compiling = False
        if self._watches(threading.get_ident()):
            graphs, breaks = _graphs_and_breaks()
            self.graphs += max(0, graphs - self._before[0])
            self.graph_breaks += max(0, breaks - self._before[1])

    def _limit_hit(self) -> None:
        self.note(_event("refused recompile", site_of_stack()))

    def _built(self, what: str) -> None:
        if not self._is_compiling:  # or else it is part of the compile that was noted
            self.note(_event("build", CompileSite(what, "", 0, "")))


def _event(kind: Kind, site: CompileSite | None) -> CompileEvent:
    site = site or CompileSite("a function", "", 0, "")
    # A captured graph runs behind a wrapper of ours, whose name says more than its place.
    place = ("", 0) if site.file == with_own_code.__code__.co_filename else (site.file, site.line)
    remedy = site.remedy or REMEDIES[kind]
    return CompileEvent(kind, site.function, *place, site.reason, threading.get_ident(), remedy)


def _graphs_and_breaks() -> tuple[int, int]:
    from torch._dynamo.utils import counters, graph_break_reasons

    return counters["stats"]["unique_graphs"], len(graph_break_reasons)
