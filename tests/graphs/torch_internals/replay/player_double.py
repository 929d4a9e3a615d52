"""Plays tapes in Python, call by call: what the player in C must do, and nothing more."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from graphs.torch_internals.replay.calls import Call


class PlayerDouble:
    """Calls functions through ctypes.

    Attributes:
        played: how many calls it made of each tape.
        fails: whether a call fails, and none is made.
    """

    entry, most_words, ops = 7, 64, frozenset[str]()

    def __init__(self) -> None:
        self.played: list[int] = []
        self.fails = False

    @contextlib.contextmanager
    def noting(self) -> Iterator[Callable[[], Call | None]]:
        yield lambda: None

    def call_of(self, op, args, kwargs, made) -> Call | None:
        return None

    def play(self, words: NDArray[np.int64]) -> None:
        if self.fails:
            raise RuntimeError("a call failed")
        at = calls = 0
        while at < len(words):
            count, entry, function, *rest = words[at : at + words[at]].tolist()
            assert entry == self.entry and len(rest) == self.most_words
            kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self.most_words)
            kind(function)(*rest)
            at, calls = at + count, calls + 1
        self.played.append(calls)
