"""Finds compilers among the commands that a process starts, from Python's audit events."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["BUILD_EVENTS", "build_of", "command_of"]

BUILD_EVENTS = frozenset(
    {"subprocess.Popen", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "os.fork"}
)
_COMPILER = re.compile(
    r"(?:^|-)(?:g\+\+|gcc|c\+\+|cc|(?:amd)?clang(?:\+\+)?|icpx?|nvcc|hipcc|ptxas|cicc|ocloc|cl)"
    r"(?:-[\d.]+)?(?:\.exe)?$"
)
_NINJA = re.compile(r"^ninja(?:-build)?(?:\.exe)?$")
_SHELL = re.compile(r"^(?:ba|da|z|k)?sh$")
_RUNS_TEXT = re.compile(r"^-\w*c$")
_LAUNCHER = re.compile(r"^(?:s?ccache|distcc|icecc|env|nice|time|exec)$")
_ASSIGNMENT = re.compile(r"^\w+=")
_SOURCE = re.compile(
    r"\.(?:c|cc|cpp|cxx|c\+\+|cu|cuh|hip|ptx|ll|bc|mlir|s|o|cl|cubin)$", re.IGNORECASE
)
_SEPARATOR = re.compile(r"^[;&|()\n]+$")


def command_of(event: str, args: Sequence[Any], caller: FrameType | None) -> Sequence[object]:
    """The command that an audit event starts, empty if it starts none or was seen before.

    Args:
        event, args: as Python passes them to an audit hook.
        caller: the frame that called the audited function.
    """
    command: object = ()
    if event == "subprocess.Popen":
        command = args[1]
    elif event == "os.system":
        command = ["sh", "-c", args[0]]
    elif event == "os.exec":
        command = args[1]
    elif event == "os.spawn":  # on Windows; elsewhere it is a fork
        command = args[2]
    elif event == "os.posix_spawn":
        name = caller.f_globals.get("__name__") if caller is not None else ""
        command = () if name == "subprocess" else args[1]
    elif event == "os.fork" and caller is not None and caller.f_code.co_name == "_spawnvef":
        command = caller.f_locals.get("args")
    return command if isinstance(command, (list, tuple)) else ()


def build_of(command: Sequence[object]) -> str:
    """The source file that a command compiles, or `ninja`; empty if it compiles nothing.

    Looks into `sh -c` and behind launchers such as `ccache`.
    """
    words = [_text(word) for word in command]
    while words and (_LAUNCHER.search(_program(words[0])) or _ASSIGNMENT.search(words[0])):
        words = words[1:]
    program = _program(words[0]) if words else ""
    if _SHELL.search(program):
        texts = [after for word, after in pairwise(words) if _RUNS_TEXT.search(word)]
        parts = _commands(texts[0]) if texts else ()
        return next((built for part in parts if (built := build_of(part))), "")
    if _NINJA.search(program):
        return "" if "--version" in words else "a C++ extension (ninja)"
    if not _COMPILER.search(program):
        return ""
    files = [word for word in words[1:] if not word.startswith("-")]
    return Path(next((f for f in files if _SOURCE.search(f)), files[0] if files else "")).name


def _text(word: object) -> str:
    return os.fsdecode(word) if isinstance(word, (bytes, os.PathLike)) else str(word)


def _program(word: str) -> str:
    return re.split(r"[/\\]", word)[-1]


def _commands(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in lexer:
            if _SEPARATOR.search(word):
                yield words
                words = []
            else:
                words.append(word)
    except ValueError:  # an unclosed quote
        return
    yield words
