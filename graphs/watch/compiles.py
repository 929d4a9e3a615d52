"""Watch what torch compiles, records and builds, in one thread or in the process.

Python's audit event `subprocess.Popen` of a compiler reveals kernels that are built outside of
Dynamo (`torch.utils.cpp_extension`, inductor). Kernels that are loaded from a cache, or built by
another process, do not count.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from graphs.errors import GraphBudgetExceeded
from graphs.torch_internals.events import CompileHooks, graphs_and_breaks, interrupts_dynamo
from graphs.watch.causes import CompileEvent, CompileSite, Kind, event_at, site_of_stack

__all__ = ["CompileWatch", "build_of", "no_compile", "note_capture"]

_log = logging.getLogger(__name__)

_TRIGGERS: dict[str, Kind] = {"LAZY_BACKWARD": "backward", "CUDAGRAPH_RECORDING": "recording"}
_COMPILER = re.compile(
    r"(?:^|-)(?:g\+\+|gcc|c\+\+|cc|clang|clang\+\+|icpx?|nvcc|hipcc|ptxas|cl)(?:-[\d.]+)?(?:\.exe)?$"
)
_NINJA = re.compile(r"^ninja(?:-build)?(?:\.exe)?$")

# Replaced as a whole, so that threads may start and stop watches while another one compiles.
_watching: tuple[CompileWatch, ...] = ()
_blinded: tuple[CompileWatch, ...] = ()
_is_audited = False
# Reentrant, for a signal handler that stops a watch while this thread starts one.
_changing = threading.RLock()


class CompileWatch:
    """Collects the compiles between :meth:`start` and :meth:`stop`, or inside a `with` statement.

    Args:
        on_event: called with each event before torch compiles; what it raises reaches the caller of
            the function.
        all_threads: whether to watch the whole process, or only the thread that starts the watch.
            Work that a compile hands to other threads and processes of torch is part of it.

    Attributes:
        graphs: number of graphs that Dynamo made; a function without an operator has none.
        graph_breaks: number of graph breaks in the compiles.
        replays: number of replays of recorded graphs (CUDA's, Gaudi's, native replays on the CPU).

    Torch compiles in one thread at a time. A watch sees no compile inside another one, and none
    that begins while another thread compiles a backward or records a CUDA graph of torch's.
    `torch._dynamo.reset()` removes the callbacks: then `lost` is true, and :meth:`stop` logs a
    warning.
    """

    def __init__(
        self, on_event: Callable[[CompileEvent], None] | None = None, *, all_threads: bool = True
    ) -> None:
        self.graphs = 0
        self.graph_breaks = 0
        self.replays = 0
        self._events: list[CompileEvent] = []
        self._on_event = on_event
        self._all_threads = all_threads
        self._thread = 0
        self._before = (0, 0)
        self._is_compiling = False

    @property
    def events(self) -> tuple[CompileEvent, ...]:
        """All events so far, also after the end."""
        return tuple(self._events)

    @property
    def compiles(self) -> int:
        """Number of compiles that began."""
        return self.count("compile", "recompile", "backward")

    @property
    def lost(self) -> bool:
        """Whether `torch._dynamo.reset()` removed the callbacks of a started watch."""
        return self in _blinded or (self in _watching and not _hooks.are_added)

    def count(self, *kinds: Kind) -> int:
        """Number of events of these kinds."""
        return sum(event.kind in kinds for event in self._events)

    def start(self) -> None:
        """Begin to collect compiles.

        Raises:
            RuntimeError: it is started already.
        """
        global _watching, _blinded, _is_audited
        with _changing:
            if self in _watching:
                raise RuntimeError(
                    f"this {type(self).__name__} is armed already; nest a second one instead"
                )
            self._thread = threading.get_ident()
            if not _hooks.are_added:  # torch._dynamo.reset() removed those of the others
                _blinded = _watching
            _hooks.add()
            if not _is_audited:  # an audit hook cannot be removed
                sys.addaudithook(_audit)
                _is_audited = True
            _watching = (*_watching, self)

    def stop(self) -> None:
        """Stop collecting, and remove the callbacks from torch. May be called twice."""
        global _watching, _blinded
        with _changing:
            if self.lost:
                _log.warning("torch._dynamo.reset() was called: compiles after it were not seen")
            _watching = tuple(other for other in _watching if other is not self)
            _blinded = tuple(other for other in _blinded if other is not self)
            if not _watching:
                _hooks.remove()
        self._is_compiling = False

    def note(self, event: CompileEvent) -> None:
        """Add an event if it is of a thread that is watched."""
        if self._watches(event.thread):
            self._events.append(event)
            if self._on_event is not None:
                self._on_event(event)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

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
        if not self._is_compiling:  # else it is part of a compile that was counted
            self.note(event_at("build", CompileSite(what)))


def note_replay() -> None:
    """Count a replay of a recorded graph in every started watch of this thread."""
    thread = threading.get_ident()
    for watch in _watching:
        watch.replays += watch._watches(thread)


def watching() -> tuple[CompileWatch, ...]:
    """All started watches of the process."""
    return _watching


def _on_start(trigger: str) -> None:
    for watch in _watching:
        watch._started(trigger)


def _on_end() -> None:
    for watch in _watching:
        watch._ended()


def _on_refusal() -> None:
    for watch in _watching:
        watch.note(event_at("refused recompile", site_of_stack()))


_hooks = CompileHooks(_on_start, _on_end, _on_refusal)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event != "subprocess.Popen" or not _watching:
        return
    command = args[1]
    if isinstance(command, (list, tuple)) and (built := build_of(command)):
        for watch in _watching:
            watch._built(built)


def build_of(command: Sequence[object]) -> str:
    """The source file that a command compiles, or `ninja`; empty if it compiles nothing."""
    words = [str(word) for word in command]
    program = re.split(r"[/\\]", words[0])[-1] if words else ""
    if _NINJA.search(program):
        return "" if "--version" in words else "a C++ extension (ninja)"
    if not _COMPILER.search(program):
        return ""
    return Path(next((word for word in words[1:] if not word.startswith("-")), "")).name


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
