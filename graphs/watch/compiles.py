"""A watch over what one thread, or all of them, compile, record and build.

Torch, its log and Python's audit are hooked once, while anybody watches. The started watches are a
tuple that is replaced as a whole, so that threads may come and go while another one compiles.
Everything here may be interrupted at any line: :meth:`CompileWatch.stop`, called again, leaves
nothing behind.

`torch.utils.cpp_extension`, inductor and others also build outside of Dynamo's view, but they start
a compiler, and Python audits that (event `subprocess.Popen`). A kernel that is only loaded from a
cache, or is built by another process, does not count as a build.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from graphs.torch_internals.events import CompileHooks, graphs_and_breaks
from graphs.watch.causes import CompileSite, site_of_stack
from graphs.watch.events import CompileEvent, Kind, event_at

__all__ = ["CompileWatch", "build_of"]

_log = logging.getLogger(__name__)

_TRIGGERS: dict[str, Kind] = {"LAZY_BACKWARD": "backward", "CUDAGRAPH_RECORDING": "recording"}
_ASK = "graphs.watch.compiles.is_audited"
_COMPILER = re.compile(
    r"(?:^|-)(?:g\+\+|gcc|c\+\+|cc|clang|clang\+\+|icpx?|nvcc|hipcc|ptxas|cl)(?:-[\d.]+)?(?:\.exe)?$"
)
_NINJA = re.compile(r"^ninja(?:-build)?(?:\.exe)?$")

_watching: tuple[CompileWatch, ...] = ()
_blinded: tuple[CompileWatch, ...] = ()
# Reentrant, for a signal handler that stops a watch while this thread begins one.
_changing = threading.RLock()


class _StartedAlready(RuntimeError):
    """By somebody else, who goes on watching."""


class CompileWatch:
    """Collects the compiles between :meth:`start` and :meth:`stop`, or inside a `with` statement.

    Args:
        on_event: called with each event before torch compiles; what it raises reaches the caller of
            the function.
        all_threads: whether all of the process is watched, or only the thread that starts the
            watch. Work that a compile hands to threads and processes of torch is part of it.

    Attributes:
        graphs: how many graphs Dynamo made; fewer than compiles, where a function had no operator.
        graph_breaks: how many graph breaks the compiles met.
        replays: how many recorded graphs (CUDA's, Gaudi's, native ones of the CPU) ran again.

    Torch compiles in one thread at a time. A compile inside another compile is not seen apart, nor
    is one that begins while another thread compiles a backward or records a CUDA graph of torch's.
    `torch._dynamo.reset()` removes the callbacks: then `lost` is true, and its end is
    logged as a warning. After an interruption at any moment :meth:`stop` leaves nothing behind.
    """

    def __init__(
        self,
        on_event: Callable[[CompileEvent], None] | None = None,
        *,
        all_threads: bool = True,
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
        """Everything seen so far, also after the end."""
        return tuple(self._events)

    @property
    def compiles(self) -> int:
        """How many compiles began."""
        return self.count("compile", "recompile", "backward")

    @property
    def lost(self) -> bool:
        """Whether `torch._dynamo.reset()` has blinded a started watch."""
        return self in _blinded or (self in _watching and not _is_hooked())

    def count(self, *kinds: Kind) -> int:
        """How many events of these kinds were seen."""
        return sum(event.kind in kinds for event in self._events)

    def start(self) -> None:
        """Begin to see compiles. After an interruption call :meth:`stop`.

        Raises:
            RuntimeError: it is started already.
        """
        global _watching, _blinded
        with _changing:
            if self in _watching:
                raise _StartedAlready(
                    f"this {type(self).__name__} is armed already; nest a second one instead"
                )
            self._thread = threading.get_ident()
            if not _is_hooked():  # torch._dynamo.reset() took the hooks away from those before
                _blinded = _watching
            _hook()
            _watching = (*_watching, self)

    def stop(self) -> None:
        """Stop seeing compiles, leaving nothing behind in torch. May be called twice."""
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
        """Take an event, if it is of a thread that is watched."""
        if self._watches(event.thread):
            self._events.append(event)
            if self._on_event is not None:
                self._on_event(event)

    def __enter__(self) -> Self:
        try:
            self.start()
            return self  # inside, for an interrupt here
        except _StartedAlready:
            raise
        except BaseException:
            self.stop()
            raise

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
        if not self._is_compiling:  # or else it is part of the compile that was noted
            self.note(event_at("build", CompileSite(what)))


def note_replay() -> None:
    """Tell every started watch of this thread that a recorded graph runs again."""
    thread = threading.get_ident()
    for watch in _watching:
        watch.replays += watch._watches(thread)


def watching() -> tuple[CompileWatch, ...]:
    """All that are started, in any thread."""
    return _watching


def _is_hooked() -> bool:
    return _hooks.are_added


def _hook() -> None:
    _hooks.add()
    if not _is_audited():
        sys.addaudithook(_audit)


def _tell_started(trigger: str) -> None:
    for watch in _watching:
        watch._started(trigger)


def _tell_ended() -> None:
    for watch in _watching:
        watch._ended()


def _tell_refused() -> None:
    for watch in _watching:
        watch.note(event_at("refused recompile", site_of_stack()))


_hooks = CompileHooks(_tell_started, _tell_ended, _tell_refused)


def _is_audited() -> bool:
    # Asked, not remembered: an interrupt between hooking and remembering would hook twice.
    answers: list[bool] = []
    sys.audit(_ASK, answers)
    return bool(answers)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # It can never be taken out again, so it does nothing while nobody watches.
    if event == _ASK:
        args[0].append(True)
    if event != "subprocess.Popen" or not _watching:
        return
    command = args[1]
    if isinstance(command, (list, tuple)) and (built := build_of(command)):
        for watch in _watching:
            watch._built(built)


def build_of(command: Sequence[object]) -> str:
    """The source file that a command builds, or `ninja`; empty if it builds nothing.

    Asking a compiler for its version is none.
    """
    words = [str(word) for word in command]
    program = re.split(r"[/\\]", words[0])[-1] if words else ""
    if _NINJA.search(program):
        return "" if "--version" in words else "a C++ extension (ninja)"
    if not _COMPILER.search(program):
        return ""
    return Path(next((word for word in words[1:] if not word.startswith("-")), "")).name
