"""Sees every C++, CUDA or ninja process that this process starts: a kernel that is built lazily.

`torch.utils.cpp_extension`, inductor and others build outside of Dynamo's view, but they start a
compiler, and Python audits that (event `subprocess.Popen`). What is only loaded from a cache, or is
built by another process, is no build here.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["build_of", "listen", "unlisten"]

_COMPILER = re.compile(
    r"(?:^|-)(?:g\+\+|gcc|c\+\+|cc|clang|clang\+\+|icpx?|nvcc|hipcc|ptxas|cl)(?:-[\d.]+)?(?:\.exe)?$"
)
_NINJA = re.compile(r"^ninja(?:-build)?(?:\.exe)?$")

# An audit hook can never be taken out again, so there is one, which does nothing while nobody
# listens.
_listeners: tuple[Callable[[str], None], ...] = ()
_changing = threading.RLock()
_ASK = "graphs.watch.builds.is_hooked"


def listen(listener: Callable[[str], None]) -> None:
    """Call `listener` before each build, in the thread that starts it; its error stops it.

    It is given the name of what is built. One that listens already is not called twice.
    """
    global _listeners
    with _changing:
        if listener not in _listeners:
            _listeners = (*_listeners, listener)
        if not _is_hooked():
            sys.addaudithook(_audit)


def unlisten(listener: Callable[[str], None]) -> None:
    """Stop calling `listener`. Does nothing if it does not listen."""
    global _listeners
    with _changing:
        _listeners = tuple(each for each in _listeners if each != listener)


def build_of(command: Sequence[object]) -> str:
    """What a command builds: its source file, or `ninja`; empty if it is no build.

    Asking a compiler for its version is none.
    """
    words = [str(word) for word in command]
    program = re.split(r"[/\\]", words[0])[-1] if words else ""
    if _NINJA.search(program):
        return "" if "--version" in words else "a C++ extension (ninja)"
    if not _COMPILER.search(program):
        return ""
    source = next((word for word in words[1:] if not word.startswith("-")), "")
    return Path(source).name


def _is_hooked() -> bool:
    # Asked, not remembered: an interrupt between hooking and remembering would hook twice.
    answers: list[bool] = []
    sys.audit(_ASK, answers)
    return bool(answers)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == _ASK:
        args[0].append(True)
    if event != "subprocess.Popen" or not _listeners:
        return
    command = args[1]
    if isinstance(command, (list, tuple)) and (built := build_of(command)):
        for listener in _listeners:
            listener(built)
