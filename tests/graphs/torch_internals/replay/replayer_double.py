"""A replayer in Python: makes the calls one by one, and nothing more."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from graphs.torch_internals.replay.calls import Call


class ReplayerDouble:
    """Calls functions through ctypes.

    Attributes:
        replayed: how many calls each replay made.
        fails: whether a call fails, and none is made.
    """

    entry, max_args, ops = 7, 64, frozenset[str]()

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.fails = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], Call | None]]:
        yield lambda: None

    def call_of(self, op, args, kwargs, made) -> Call | None:
        return None

    def replay(self, words: NDArray[np.int64]) -> None:
        if self.fails:
            raise RuntimeError("a call failed")
        at = calls = 0
        while at < len(words):
            count, entry, function, *rest = words[at : at + words[at]].tolist()
            assert entry == self.entry and len(rest) == self.max_args
            kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self.max_args)
            kind(function)(*rest)
            at, calls = at + count, calls + 1
        self.replayed.append(calls)
