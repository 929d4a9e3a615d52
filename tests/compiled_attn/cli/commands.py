"""A command as the console script runs it, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Outcome(NamedTuple):
    """Exit code, stdout and stderr."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


def assert_refused(outcome: Outcome, *parts: str, at_once: bool = True) -> None:
    """Exit code 2, and nothing but one line on stderr that holds all the parts.

    ``at_once`` False: that line is the last, as a warmup came before it.
    """
    lines = outcome.err.splitlines()
    lines = lines if at_once else lines[-1:]
    assert outcome.code == 2, outcome.err
    assert len(lines) == 1 and lines[0].startswith("compiled-attn: error:"), outcome.err
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
