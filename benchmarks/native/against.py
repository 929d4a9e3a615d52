"""Timing in turns with a second process, which imports another checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

Made = TypeVar("Made")


def answer(
    cases: Iterable[tuple[str, Callable[[], Made]]], time_of: Callable[[Made], float], rounds: int
) -> None:
    """The other process: a case's name, then its time in each round, each when asked for."""
    for name, make in cases:
        input()
        made = make()
        print(name, flush=True)
        for _ in range(rounds):
            input()
            print(time_of(made), flush=True)


def other_process(directory: str, *arguments: str) -> Callable[[], str]:
    """Starts this script with ``--answers`` on a checkout; the function asks it for a line."""
    process = subprocess.Popen(
        [sys.executable, sys.argv[0], "--answers", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": directory},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    ask, answers = process.stdin, process.stdout

    def line() -> str:
        print(file=ask, flush=True)
        return answers.readline().strip()

    return line
