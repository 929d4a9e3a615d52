"""Events of a watch: a compile, build, recording or capture, with its cause and remedy."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, TypeAlias

from graphs.capture.wrappers import with_own_code
from graphs.watch.causes import CompileSite

__all__ = ["CompileEvent", "event_at"]

Kind: TypeAlias = Literal[
    "compile",
    "recompile",
    "refused recompile",
    "backward",
    "recording",
    "build",
    "capture",
]

_REMEDIES: dict[Kind, str] = {
    "compile": "call it once in the warmup, or capture it with graphs.capture",
    "recompile": "capture this case in the warmup",
    "refused recompile": "capture this case in the warmup",
    "backward": "run its backward in the warmup too, or serve under torch.no_grad()",
    "recording": "run this case twice in the warmup, where its graph is recorded",
    "build": "build it before serving, by running it once in the warmup",
    "capture": "capture this case in the warmup",
}


@dataclass(frozen=True)
class CompileEvent:
    """A compile, build, recording or capture.

    Attributes:
        kind: `compile` of a new function; `recompile` after a guard failed; `refused recompile` of
            a function at its recompile limit, which runs eagerly or raises; `backward` that is
            compiled when it is first needed; `recording` of a CUDA graph; `build` of a kernel by a
            C++ or CUDA compiler outside of any compile; `capture`, a late :func:`graphs.capture`.
        function: its name, or the name of the captured graph or of the file that is built.
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
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.kind} of {self.function}{place}{reason}"


def event_at(kind: Kind, site: CompileSite | None) -> CompileEvent:
    """An event of the calling thread; `site` is None if unknown."""
    site = site or CompileSite("a function")
    # The wrapper of a captured graph has the name of the graph, but its place says nothing.
    place = ("", 0) if site.file == with_own_code.__code__.co_filename else (site.file, site.line)
    remedy = site.remedy or _REMEDIES[kind]
    return CompileEvent(kind, site.function, *place, site.reason, threading.get_ident(), remedy)
