"""Sees every compile in the process, from torch's own callbacks, its log, and started compilers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from graphs.alone import alone
from graphs.builds import listen, unlisten
from graphs.causes import CompileSite, site_of_stack

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
        all_threads: whether compiles of other threads than the one that started the watch are seen.

    Attributes:
        events: the events so far.
        graphs: how many graphs Dynamo made; fewer than compiles, where a function had no operator.
        graph_breaks: how many graph breaks the compiles met.

    A compile inside another compile is not seen apart. `torch._dynamo.reset()` removes the
    callbacks: `lost` tells.
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
        self._limit_handler = _LimitHandler(self._limit_hit)

    @property
    def compiles(self) -> int:
        """How many compiles began."""
        return sum(event.kind in ("compile", "recompile", "backward") for event in self.events)

    @property
    def lost(self) -> bool:
        """Whether the callbacks of a started watch have been removed by `torch._dynamo.reset()`."""
        return self._started not in _handler().start_callbacks

    def start(self) -> None:
        """Begin to see compiles."""
        self._thread = threading.get_ident()
        _handler().register_start_callback(self._started)
        _handler().register_end_callback(self._ended)
        listen(self._built)
        logging.getLogger(_LimitHandler.LOGGER).addHandler(self._limit_handler)

    def stop(self) -> None:
        """Stop seeing compiles, leaving nothing behind in torch."""
        unlisten(self._built)
        logging.getLogger(_LimitHandler.LOGGER).removeHandler(self._limit_handler)
        for callbacks, ours in (
            (_handler().start_callbacks, self._started),
            (_handler().end_callbacks, self._ended),
        ):
            if ours in callbacks:
                callbacks.remove(ours)

    def note(self, event: CompileEvent) -> None:
        """Take an event that torch does not know of."""
        if self._all_threads or event.thread == self._thread:
            self.events.append(event)
            if self._on_event is not None:
                self._on_event(event)

    def __enter__(self) -> CompileWatch:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _started(self, args: Any) -> None:
        self._before = _graphs_and_breaks()
        site = site_of_stack()
        trigger = args.callback_trigger.name
        if trigger == "DYNAMO":
            self.note(_event("recompile" if site and site.reason else "compile", site))
        else:
            self.note(_event(_TRIGGERS.get(trigger, "build"), site))
        self._is_compiling = True

    def _ended(self, args: Any) -> None:
        self._is_compiling = False
        if self._all_threads or threading.get_ident() == self._thread:
            graphs, breaks = _graphs_and_breaks()
            self.graphs += max(0, graphs - self._before[0])
            self.graph_breaks += max(0, breaks - self._before[1])

    def _limit_hit(self) -> None:
        self.note(_event("refused recompile", site_of_stack()))

    def _built(self, what: str) -> None:
        if not self._is_compiling:  # or else it is part of the compile that was noted
            self.note(_event("build", CompileSite(what, "", 0, "")))


class _LimitHandler(logging.Handler):
    # A function that has used up its recompiles runs eagerly from then on; torch says so in its log
    # and nowhere else.
    LOGGER = "torch._dynamo.convert_frame"

    def __init__(self, on_hit: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._on_hit = on_hit

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("torch._dynamo hit config."):
            self._on_hit()


def _event(kind: Kind, site: CompileSite | None) -> CompileEvent:
    site = site or CompileSite("a function", "", 0, "")
    # A captured graph runs behind a wrapper of ours, whose name says more than its place.
    place = ("", 0) if site.file == alone.__code__.co_filename else (site.file, site.line)
    remedy = site.remedy or REMEDIES[kind]
    return CompileEvent(kind, site.function, *place, site.reason, threading.get_ident(), remedy)


def _handler() -> Any:
    # torch._dynamo takes seconds to import: not before someone compiles or watches.
    import torch._dynamo

    return torch._dynamo.callback.callback_handler


def _graphs_and_breaks() -> tuple[int, int]:
    from torch._dynamo.utils import counters, graph_break_reasons

    return counters["stats"]["unique_graphs"], len(graph_break_reasons)
