"""Why torch compiled, would not compile, or no longer accepts what it compiled, in one line.

Dynamo hands its reasons to its log; what it knows at that moment is in the locals of one of its
frames. Reading them there is the one thing here that depends on torch's inside: where it fails, the
reason is empty and all else works.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType

__all__ = [
    "CompileSite",
    "describe_failure",
    "reason_of",
    "site_of_error",
    "site_of_stack",
    "user_line",
]

_COMPILE_ID = re.compile(r"^\[?\d+/\d+(_\d+)?\]?:\s*")
_LONGEST = 400
_ERROR_LINE = re.compile(r"\b(fatal )?error\b", re.IGNORECASE)


@dataclass(frozen=True)
class CompileSite:
    """What Dynamo is compiling, and which guard sent it there (empty for a first compile)."""

    function: str
    file: str
    line: int
    reason: str


def site_of_stack() -> CompileSite | None:
    """What Dynamo is compiling in the calling thread, from inside one of its callbacks."""
    return _site(_outward(sys._getframe(1)))


def site_of_error(error: BaseException) -> CompileSite | None:
    """What Dynamo was compiling when `error` was raised."""
    return _site(_frames(error.__traceback__))


def describe_failure(error: BaseException) -> str:
    """Why a compile failed, in one line, after the user's file and line if torch knows them."""
    file, line = user_line(error)
    return (f"{file}:{line}: " if file else "") + reason_of(error)


def reason_of(error: BaseException) -> str:
    """The first meaningful line of why a compile failed."""
    cause = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    if type(cause).__name__ == "CppCompileError":
        line = next((text for text in lines[1:] if _ERROR_LINE.search(text)), line)
    if detail := next((text for text in lines if text.startswith("Explanation:")), ""):
        line = f"{line}: {detail.removeprefix('Explanation:').strip()}"
    kind = type(cause)
    by_dynamo = kind.__module__.startswith("torch._dynamo")
    text = line if by_dynamo and line else f"{kind.__name__}: {line}".rstrip(": ")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def user_line(error: BaseException) -> tuple[str, int]:
    """File and line of the user's code that a compile failed at, empty and 0 if unknown."""
    stack = getattr(error, "real_stack", None)
    return (stack[-1].filename, stack[-1].lineno or 0) if stack else ("", 0)


def _site(frames: Iterable[FrameType]) -> CompileSite | None:
    for frame in frames:
        code = frame.f_code
        if code.co_name == "_compile" and code.co_filename.endswith("convert_frame.py"):
            compiled, reason = frame.f_locals.get("code"), frame.f_locals.get("recompile_reason")
            if isinstance(compiled, CodeType):
                where = (compiled.co_name, compiled.co_filename, compiled.co_firstlineno)
                return CompileSite(*where, _first_line(reason))
    return None


def _first_line(reason: object) -> str:
    text = str(reason or "").strip().split("\n")[0].split(" # ")[0]
    return _COMPILE_ID.sub("", text).strip()


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
