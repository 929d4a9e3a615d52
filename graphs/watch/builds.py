"""Commands that build a kernel: a C++ or CUDA compiler with a source, or ninja."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["build_of"]

_COMPILER = re.compile(
    r"(?:^|-)(?:g\+\+|gcc|c\+\+|cc|clang|clang\+\+|icpx?|nvcc|hipcc|ptxas|cl)(?:-[\d.]+)?(?:\.exe)?$"
)
_NINJA = re.compile(r"^ninja(?:-build)?(?:\.exe)?$")


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
