"""Watch what torch compiles, records and builds, in one thread or in the process.

Dynamo and Triton call hooks; Python's audit events reveal a compiler that this process starts
(`torch.utils.cpp_extension`, inductor, FlashInfer); XLA and Gaudi's bridge only count. None of them
is imported here: hooks are added once the program has imported them. Kernels that are loaded from a
cache do not count.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

from graphs.errors import GraphBudgetExceeded
from graphs.torch_internals.device_counters import DeviceCounters
from graphs.torch_internals.events import CompileHooks, graphs_and_breaks, interrupts_dynamo
from graphs.torch_internals.triton_hooks import Kernel, TritonHooks
from graphs.watch.builds import BUILD_EVENTS, build_of, command_of
from graphs.watch.causes import CompileEvent, CompileSite, Kind, event_at, site_of_stack

__all__ = ["CompileWatch", "forget_inherited", "late_error", "note_capture", "note_replay"]

_log = logging.getLogger(__name__)

_TRIGGERS: dict[str, Kind] = {"LAZY_BACKWARD": "backward", "CUDAGRAPH_RECORDING": "recording"}
_IN_DYNAMO: tuple[Kind, ...] = (
    "compile",
    "recompile",
    "refused recompile",
    "backward",
    "recording",
)
_AUDITED = BUILD_EVENTS | {"import"}

# Replaced as a whole, so that threads may start and stop watches while another one compiles.
_watching: tuple[CompileWatch, ...] = ()
_blinded: tuple[CompileWatch, ...] = ()
_is_audited = False
# Reentrant, for a signal handler that stops a watch while this thread starts one.
_changing = threading.RLock()


class CompileWatch:
    """Collects the compiles between :meth:`start` and :meth:`stop`, or inside a `with` statement.

    Args:
        on_event: called with each event before torch compiles (after Triton has compiled a kernel,
            and before it runs); what it raises reaches the caller of the function. Compiles that
            only a counter shows (XLA, Gaudi) are passed on by :meth:`check` and :meth:`stop`.
        all_threads: whether to watch the whole process, or only the thread that starts the watch.
            Work that a compile hands to other threads and processes of torch is part of it.
            Counters are those of the process.

    Attributes:
        graphs: number of graphs that Dynamo made; a function without an operator has none.
        graph_breaks: number of graph breaks in the compiles.
        replays: number of replays of recorded graphs (CUDA's, Gaudi's, native replays on the CPU).

    Torch compiles in one thread at a time. A watch sees no compile inside another one, and none
    that begins while another thread compiles a backward or records a CUDA graph of torch's.
    `torch._dynamo.reset()` removes the callbacks: then `lost` is true, and :meth:`stop` logs a
    warning.
    """

    # Whether calls of graphs.capture are events, and the folder through which workers report.
    notes_captures = False
    worker_folder: str | None = None

    def __init__(
        self, on_event: Callable[[CompileEvent], None] | None = None, *, all_threads: bool = True
    ) -> None:
        self.graphs = 0
        self.graph_breaks = 0
        self.replays = 0
        self._events: list[CompileEvent] = []
        self._unchecked: list[CompileEvent] = []
        self._on_event = on_event
        self._all_threads = all_threads
        self._thread = 0
        self._before = (0, 0)
        self._is_compiling = False
        self._counters: DeviceCounters | None = None

    @property
    def events(self) -> tuple[CompileEvent, ...]:
        """All events so far, also after the end."""
        self._collect()
        return tuple(self._events)

    @property
    def compiles(self) -> int:
        """Number of compiles of torch that began."""
        return self.count("compile", "recompile", "backward")

    @property
    def device_compiles(self) -> int:
        """Number of graphs that XLA or Gaudi's bridge compiled, by their counters."""
        return self.count("device compile")

    @property
    def lost(self) -> bool:
        """Whether `torch._dynamo.reset()` removed the callbacks of a started watch."""
        return self in _blinded or (self in _watching and _dynamo.are_lost)

    def count(self, *kinds: Kind) -> int:
        """Number of events of these kinds."""
        return sum(event.kind in kinds for event in self.events)

    def start(self) -> None:
        """Begin to collect compiles.

        Raises:
            RuntimeError: it is started already.
        """
        global _watching, _blinded, _is_audited
        counters = DeviceCounters()
        with _changing:
            if self in _watching:
                raise RuntimeError(
                    f"this {type(self).__name__} is armed already; nest a second one instead"
                )
            self._thread = threading.get_ident()
            self._counters = counters
            if _dynamo.are_lost:  # torch._dynamo.reset() removed those of the others
                _blinded = _watching
            _dynamo.add()
            _triton.add()
            if not _is_audited:  # an audit hook cannot be removed
                sys.addaudithook(_audit)
                _is_audited = True
            _watching = (*_watching, self)

    def stop(self) -> None:
        """Stop collecting, and remove the callbacks from torch. May be called twice.

        Raises:
            Exception: what `on_event` raises of events that :meth:`check` would pass to it.
        """
        global _watching, _blinded
        with _changing:
            if self.lost:
                _log.warning("torch._dynamo.reset() was called: compiles after it were not seen")
            _watching = tuple(other for other in _watching if other is not self)
            _blinded = tuple(other for other in _blinded if other is not self)
            if not _watching:
                _dynamo.remove()
                if _triton.remove():
                    _log.warning("Triton's hooks were replaced: some kernels may not be seen")
        self._is_compiling = False
        self._collect()
        self._counters = None
        self.check()

    def check(self) -> None:
        """Pass events that only counters showed to `on_event`; cheap enough for each request."""
        self._collect()
        while self._unchecked:
            event = self._unchecked.pop(0)
            if self._on_event is not None:
                self._on_event(event)

    def note(self, event: CompileEvent) -> None:
        """Add an event if it is of a thread that is watched."""
        if self._watches(event.thread):
            self._events.append(event)
            if self._on_event is not None:
                self._on_event(event)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.stop()
        except Exception:
            if kind is None:  # else the first error is the one to see
                raise

    def _collect(self) -> None:
        for compiler, count in (self._counters.new() if self._counters else {}).items():
            event = event_at("device compile", CompileSite(f"a graph by {compiler}"))
            self._found_later([event] * count)

    def _found_later(self, events: list[CompileEvent]) -> None:
        self._events += events
        self._unchecked += events

    def _watches(self, thread: int) -> bool:
        return self._all_threads or thread == self._thread

    def _started(self, trigger: str) -> None:
        if not self._watches(threading.get_ident()):
            return
        self._before = graphs_and_breaks()
        site = site_of_stack()
        first: Kind = "recompile" if site and site.reason else "compile"
        self.note(event_at(first if trigger == "DYNAMO" else _TRIGGERS.get(trigger, "build"), site))
        self._is_compiling = True

    def _ended(self) -> None:
        self._is_compiling = False
        if self._watches(threading.get_ident()):
            graphs, breaks = graphs_and_breaks()
            self.graphs += max(0, graphs - self._before[0])
            self.graph_breaks += max(0, breaks - self._before[1])

    def _built(self, what: str) -> None:
        self._note_kernel("build", CompileSite(what))

    def _note_kernel(self, kind: Kind, site: CompileSite) -> None:
        if not self._is_compiling:  # else it is part of a compile that was counted
            self.note(event_at(kind, site))


def note_replay() -> None:
    """Count a replay of a recorded graph in every started watch of this thread."""
    thread = threading.get_ident()
    for watch in _watching:
        watch.replays += watch._watches(thread)


def note_capture(name: str) -> None:
    """Report a late capture to every armed sentinel.

    Raises:
        GraphBudgetExceeded: a strict sentinel is armed.
    """
    for watch in _watching:
        if watch.notes_captures:
            watch.note(event_at("capture", CompileSite(name)))


def late_error(event: CompileEvent) -> GraphBudgetExceeded:
    """The error of a strict sentinel, which passes through Dynamo if that is what compiles."""
    if event.kind in _IN_DYNAMO:
        # Dynamo wraps what its callbacks raise in an internal error, except its own exceptions.
        return interrupts_dynamo(GraphBudgetExceeded)(event)  # type: ignore[return-value]
    return GraphBudgetExceeded(event)


def forget_inherited(folder: str) -> None:
    """In a process that was forked: end watches of the parent that report through a folder."""
    global _watching, _blinded, _changing
    _changing = threading.RLock()  # another thread of the parent may have held it
    _watching = tuple(each for each in _watching if each.worker_folder != folder)
    _blinded = tuple(each for each in _blinded if each.worker_folder != folder)


def _on_start(trigger: str) -> None:
    for watch in _watching:
        watch._started(trigger)


def _on_end() -> None:
    for watch in _watching:
        watch._ended()


def _on_refusal() -> None:
    for watch in _watching:
        watch.note(event_at("refused recompile", site_of_stack()))


def _on_kernel(kernel: Kernel) -> None:
    types = f"for {kernel.types}" if kernel.types else ""
    site = CompileSite(kernel.name, kernel.file, kernel.line, types)
    for watch in _watching:
        watch._note_kernel("triton build", site)


_dynamo = CompileHooks(_on_start, _on_end, _on_refusal)
_triton = TritonHooks(_on_kernel)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _AUDITED or not _watching:
        return
    if event == "import":
        # Both packages import many more modules after the one that has their hooks.
        if _changing.acquire(blocking=False):
            try:
                _dynamo.add_once()
                _triton.add()
            finally:
                _changing.release()
        return
    built = build_of(command_of(event, args, sys._getframe(1)))
    if built and not _triton.will_report():  # else it is Triton's own call of ptxas
        for watch in _watching:
            watch._built(built)
