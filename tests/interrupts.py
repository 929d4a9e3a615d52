"""Raises an exception at a chosen line of the library, as Ctrl-C would: to show what it leaves.

``count_lines(function)`` says at how many places a run can be interrupted, ``interrupted_at(n)``
interrupts the n-th of them. A test goes through all, each on a fresh or a mended object::

    for n in range(count_lines(make_engine().step)):
        engine = make_engine()
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(n) as cut:
            engine.step()
        check(engine, cut.where)  # "compiled_attn/engine/engine.py:120"

or, where a run goes on for long, until nothing is raised any more: ``while cut.was_raised``.

A *place* is the 'line' event of ``sys.settrace``, in any frame of the calling thread whose code is
in a file of ``compiled_attn/`` or ``graphs/``: before each line that is executed, as often as it
is. Code that those call (torch, numpy, the standard library) and code that calls them (the test)
is not interrupted; graphs that a compiler made have no lines. The way out of a ``with`` block is
part of the next place: Python looks for signals after calls, at the start of a function and at
jumps back, so that none comes between the end of a block and the release of its lock. What traced
the thread before (coverage, a debugger, an outer ``interrupted_at``) does not see the run and is
put back after it.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import compiled_attn
import graphs

__all__ = ["Interruption", "count_lines", "interrupted_at"]

_FOLDERS = tuple(f"{Path(package.__file__).parent}{os.sep}" for package in (compiled_attn, graphs))
_TOP = Path(_FOLDERS[0]).parent


class Interruption:
    """A context that counts the line events of our files in it and raises at one of them.

    It swallows nothing. After the exception was raised, what still runs (handlers, ``finally``) is
    neither counted nor interrupted.

    Attributes:
        lines: line events seen so far, the one that raised not counted.
        was_raised: whether the place was reached. The exception can still be lost on its way, where
            the interpreter has nobody to give it to (``__del__``, callbacks of weak references) or
            the code under test caught it.
        where: ``"file:line"`` of the place, relative to the repository; "" until it is reached.
    """

    def __init__(
        self, at: int, exception: BaseException | type[BaseException] = KeyboardInterrupt
    ) -> None:
        self.lines = 0
        self.was_raised = False
        self.where = ""
        self._at = at
        self._exception = exception
        self._before: Any = None

    def __enter__(self) -> Interruption:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        ours = event == "call" and frame.f_code.co_filename.startswith(_FOLDERS)
        return self._traced if ours else None

    def _traced(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if event != "line" or self.was_raised:
            return self._traced
        if self.lines >= self._at >= 0 and not _leaves_with(frame):
            self.was_raised = True
            self.where = f"{Path(frame.f_code.co_filename).relative_to(_TOP)}:{frame.f_lineno}"
            raise self._made()
        self.lines += 1
        return self._traced

    def _made(self) -> BaseException:
        if isinstance(self._exception, type):
            return self._exception(f"injected at {self.where}")
        return self._exception


def _leaves_with(frame: FrameType) -> bool:
    """Whether the next instructions call the exit of a context manager.

    That is with three times None, or from the handler of an exception in its block.
    """
    ahead = (each for each in dis.get_instructions(frame.f_code) if each.offset >= frame.f_lasti)
    first = list(islice((each for each in ahead if each.opname not in ("SWAP", "NOP")), 3))
    names = [each.opname for each in first]
    is_left = names == ["LOAD_CONST"] * 3 and all(each.argval is None for each in first)
    return is_left or names[:2] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]


def interrupted_at(
    n: int, exception: BaseException | type[BaseException] = KeyboardInterrupt
) -> Interruption:
    """A context manager that raises ``exception`` at the n-th line event (from 0) inside.

    Nothing is raised where fewer lines run; ``with ... as cut`` then says ``cut.was_raised`` is
    False.
    """
    return Interruption(n, exception)


def count_lines(function: Callable[[], object]) -> int:
    """Run ``function`` and return how many line events of our files it executed."""
    with Interruption(-1) as counted:
        function()
    return counted.lines
