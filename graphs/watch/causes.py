"""Why torch compiled, failed to compile, or rejected a graph: one-line causes, and events.

Dynamo's reasons for a recompile are in the locals of one of its frames. If they are not found
there, the reason is empty and all else works.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary, walk_stack, walk_tb
from types import CodeType, FrameType
from typing import Any, Literal, TypeAlias

from graphs.torch_internals.events import is_of_dynamo
from graphs.watch.guards import meaning_of

__all__ = [
    "CompileEvent",
    "CompileSite",
    "Kind",
    "describe_failure",
    "event_at",
    "reason_of",
    "site_of_error",
    "site_of_stack",
    "user_line",
    "user_line_in",
]

_COMPILE_ID = re.compile(r"^\[?\d+/\d+(_\d+)?\]?:\s*")
_GUARDED_AT = re.compile(r"  # (?:.*[/\\])?([^/\\]+:\d+) in ")
_LONGEST = 400
_ERROR_LINE = re.compile(r"\b(fatal )?error\b", re.IGNORECASE)


@dataclass(frozen=True)
class CompileSite:
    """What Dynamo is compiling, and the guard that failed (empty for a first compile).

    `call` is that of the function, as :func:`graphs.watch.calls.describe_call` returns it.
    """

    function: str
    file: str = ""
    line: int = 0
    reason: str = ""
    remedy: str = ""
    call: Mapping[str, Any] | None = None


Kind: TypeAlias = Literal[
    "compile",
    "recompile",
    "refused recompile",
    "backward",
    "recording",
    "build",
    "capture",
    "triton build",
    "device compile",
]

_REMEDIES: dict[Kind, str] = {
    "compile": "call it once in the warmup, or capture it with graphs.capture",
    "backward": "run its backward in the warmup too, or serve under torch.no_grad()",
    "recording": "run this case twice in the warmup, where its graph is recorded",
    "build": "build it before serving, by running it once in the warmup",
    "triton build": "call it in the warmup with arguments of these types",
    "device compile": "run each shape once in the warmup, on the device",
}


@dataclass(frozen=True)
class CompileEvent:
    """A compile, build, recording or capture.

    Attributes:
        kind: `compile` of a new function; `recompile` after a guard failed; `refused recompile` of
            a function at its recompile limit, which runs eagerly or raises; `backward` that is
            compiled when it is first needed; `recording` of a CUDA graph; `build` of a kernel by a
            C++ or CUDA compiler outside of any compile; `capture`, a late :func:`graphs.capture`;
            `triton build` of a Triton kernel; `device compile` of a graph by XLA or Gaudi's bridge,
            which only their counters show.
        function: its name, or the name of the captured graph or of the file that is built.
        file, line: where the function is, empty and 0 if unknown.
        reason: the guard or tensor that caused it, empty for a first compile.
        thread: identifier of the compiling thread.
        remedy: what to do about it.
        worker: name and process id of the worker process in which it happened, empty in this one.
        call: the function's inputs, without their contents: what a later warmup repeats it from;
            None if unknown.
    """

    kind: Kind
    function: str
    file: str
    line: int
    reason: str
    thread: int
    remedy: str = ""
    worker: str = ""
    call: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        location = f" ({self.file}:{self.line})" if self.file else ""
        worker = f" in {self.worker}" if self.worker else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.kind} of {self.function}{location}{worker}{reason}"


def event_at(kind: Kind, site: CompileSite | None) -> CompileEvent:
    """An event of the calling thread; `site` is None if unknown."""
    site = site or CompileSite("a function")
    # The wrapper of a captured graph has the name of the graph, but its file says nothing.
    is_wrapper = bool(site.file) and site.file == _wrapper_file()
    file, line, call = ("", 0, None) if is_wrapper else (site.file, site.line, site.call)
    remedy = site.remedy or _REMEDIES.get(kind, "capture this case in the warmup")
    thread = threading.get_ident()
    return CompileEvent(kind, site.function, file, line, site.reason, thread, remedy, "", call)


def site_of_stack() -> CompileSite | None:
    """What Dynamo is compiling in this thread; call it inside one of its callbacks."""
    return _site(walk_stack(sys._getframe(1)))


def site_of_error(error: BaseException) -> CompileSite | None:
    """What Dynamo was compiling when `error` was raised."""
    return _site(walk_tb(error.__traceback__))


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
    text = line if is_of_dynamo(cause) and line else f"{type(cause).__name__}: {line}".rstrip(": ")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def user_line(error: BaseException) -> tuple[str, int]:
    """File and line of the user's code that a compile failed at, empty and 0 if unknown."""
    return user_line_in(getattr(error, "real_stack", None) or ())


def user_line_in(stack: Sequence[FrameSummary]) -> tuple[str, int]:
    """File and line of the innermost frame that is neither torch's nor the wrapper of a capture.

    Falls back to torch's innermost frame, and to empty and 0 if there is no frame.
    """
    frames = [frame for frame in stack if frame.filename != _wrapper_file()]
    own = [frame for frame in frames if not frame.filename.startswith(_torch_folder())]
    innermost = (own or frames)[-1:]
    return (innermost[0].filename, innermost[0].lineno or 0) if innermost else ("", 0)


def _site(frames: Iterable[tuple[FrameType, int]]) -> CompileSite | None:
    for frame, _ in frames:
        code = frame.f_code
        if code.co_name == "_compile" and code.co_filename.endswith("convert_frame.py"):
            compiled, reason = frame.f_locals.get("code"), frame.f_locals.get("recompile_reason")
            if isinstance(compiled, CodeType):
                name = compiled.co_qualname.rpartition("<locals>.")[2]
                where = (name, compiled.co_filename, compiled.co_firstlineno)
                call = _call(compiled, frame.f_locals)
                return CompileSite(*where, *_cause(str(reason or "")), call)
    return None


def _call(code: CodeType, found: Mapping[str, Any]) -> Mapping[str, Any] | None:
    from graphs.watch.calls import describe_call

    module, values = found.get("globals"), found.get("locals")
    if not isinstance(module, dict) or not isinstance(values, dict):
        return None
    return describe_call(code, str(module.get("__name__", "")), values)


# torch takes seconds to import, and a watch that sees no compile needs none of it.
@functools.cache
def _torch_folder() -> str:
    spec = importlib.util.find_spec("torch")
    return str(Path(spec.origin).parent) if spec and spec.origin else "torch"


def _wrapper_file() -> str:
    from graphs.capture.inputs import with_own_code

    return with_own_code.__code__.co_filename


def _cause(reason: str) -> tuple[str, str]:
    # Of several cached graphs, the first line is about the newest.
    line = reason.strip().split("\n")[0]
    guard = _COMPILE_ID.sub("", line.split(" # ")[0]).strip()
    if not guard:
        return "", ""
    words, remedy = meaning_of(guard)
    location = _GUARDED_AT.search(line)
    return words + (f" (guarded at {location[1]})" if location else ""), remedy
