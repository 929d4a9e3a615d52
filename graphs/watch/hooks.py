"""Hooks into torch, its log and Python's audit that tell of compiles, for all who listen.

There is one set of hooks, while anybody listens: who listens is a tuple of ours that is replaced
whole, so that threads may come and go while another one compiles. Every function here may be
interrupted at any line: :func:`unlisten`, called again, leaves nothing behind.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Listener", "is_deaf", "listen", "unlisten"]

_LIMIT_LOG = "torch._dynamo.convert_frame"
_COMPILER = re.compile(
    r"(?:^|-)(?:g\+\+|gcc|c\+\+|cc|clang|clang\+\+|icpx?|nvcc|hipcc|ptxas|cl)(?:-[\d.]+)?(?:\.exe)?$"
)
_NINJA = re.compile(r"^ninja(?:-build)?(?:\.exe)?$")
_ASK = "graphs.watch.hooks.is_audited"


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Listener:
    """Callbacks, in the thread where it happens; what they raise stops a compile or a build.

    Attributes:
        started: torch begins to compile; given the name of its `CallbackTrigger`.
        ended: no thread compiles any more.
        refused: a function has used up its recompiles.
        built: this process starts a C++ or CUDA compiler; given what for.
    """

    started: Callable[[str], None] = _ignore
    ended: Callable[[], None] = _ignore
    refused: Callable[[], None] = _ignore
    built: Callable[[str], None] = _ignore


_listeners: tuple[Listener, ...] = ()
_deaf: tuple[Listener, ...] = ()
# Reentrant, for a signal handler that stops listening while this thread begins to.
_changing = threading.RLock()


def listen(listener: Listener) -> None:
    """Tell `listener` from now on."""
    global _listeners, _deaf
    with _changing:
        if not _is_heard():  # torch._dynamo.reset() took the hooks away from those before
            _deaf = _listeners
        _hook()
        _listeners = (*_listeners, listener)


def unlisten(listener: Listener) -> None:
    """Stop telling `listener`, and leave nothing behind in torch if it was the last."""
    global _listeners, _deaf
    with _changing:
        _listeners = tuple(other for other in _listeners if other is not listener)
        _deaf = tuple(other for other in _deaf if other is not listener)
        if not _listeners:
            _unhook()


def is_deaf(listener: Listener) -> bool:
    """Whether `torch._dynamo.reset()` has removed the hooks since `listener` listens."""
    return listener in _deaf or (listener in _listeners and not _is_heard())


def _is_heard() -> bool:
    return _started in _handler().start_callbacks


def _hook() -> None:
    for callbacks, ours in _callbacks():
        if ours not in callbacks:
            callbacks.append(ours)
    if not _is_audited():
        sys.addaudithook(_audit)
    logging.getLogger(_LIMIT_LOG).addHandler(_refusals)


def _unhook() -> None:
    if "torch._dynamo.callback" not in sys.modules:  # nobody has ever listened
        return
    logging.getLogger(_LIMIT_LOG).removeHandler(_refusals)
    for callbacks, ours in _callbacks():
        if ours in callbacks:
            callbacks.remove(ours)


def _callbacks() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    handler = _handler()
    return (handler.start_callbacks, _started), (handler.end_callbacks, _ended)


def _handler() -> Any:
    # torch._dynamo takes seconds to import: not before someone compiles or watches.
    import torch._dynamo

    return torch._dynamo.callback.callback_handler


def _started(args: Any) -> None:
    for listener in _listeners:
        listener.started(args.callback_trigger.name)


def _ended(_: Any) -> None:
    for listener in _listeners:
        listener.ended()


def _is_audited() -> bool:
    # Asked, not remembered: an interrupt between hooking and remembering would hook twice.
    answers: list[bool] = []
    sys.audit(_ASK, answers)
    return bool(answers)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # It can never be taken out again, so it does nothing while nobody listens.
    if event == _ASK:
        args[0].append(True)
    if event != "subprocess.Popen" or not _listeners:
        return
    command = args[1]
    if isinstance(command, (list, tuple)) and (built := _build_of(command)):
        for listener in _listeners:
            listener.built(built)


def _build_of(command: Sequence[object]) -> str:
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


class _Refusals(logging.Handler):
    # A function that has used up its recompiles runs eagerly from then on; torch says so in its log
    # and nowhere else.
    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("torch._dynamo hit config."):
            for listener in _listeners:
                listener.refused()


_refusals = _Refusals(logging.WARNING)
