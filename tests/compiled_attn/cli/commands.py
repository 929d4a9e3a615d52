"""Runs of a command as the console script starts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Completed(NamedTuple):
    """Exit code, stdout and stderr."""

    code: int
    out: str
    err: str


Command = Callable[..., Completed]


def assert_refused(completed: Completed, *parts: str, at_once: bool = True) -> None:
    """Exit code 2, and nothing but one line on stderr that holds all the parts.

    ``at_once`` False: that line is the last, as a warmup came before it.
    """
    lines = completed.err.splitlines()
    lines = lines if at_once else lines[-1:]
    assert completed.code == 2, completed.err
    assert len(lines) == 1 and lines[0].startswith("compiled-attn: error:"), completed.err
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in completed.err
    assert completed.out == ""
