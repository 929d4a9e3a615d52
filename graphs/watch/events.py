"""Events of a watch: one compile, or what stands for one, with its cause and the remedy."""

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
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.kind} of {self.function}{place}{reason}"


def event_at(kind: Kind, site: CompileSite | None) -> CompileEvent:
    """An event of the calling thread at a site, or where that is not known."""
    site = site or CompileSite("a function")
    # A captured graph runs behind a wrapper of ours, whose name says more than its place.
    place = ("", 0) if site.file == with_own_code.__code__.co_filename else (site.file, site.line)
    remedy = site.remedy or _REMEDIES[kind]
    return CompileEvent(kind, site.function, *place, site.reason, threading.get_ident(), remedy)
