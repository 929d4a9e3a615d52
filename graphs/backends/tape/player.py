"""The contract of what makes the calls of a tape: a library of native code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Call", "Player"]


class Call(NamedTuple):
    """A call in words of 64 bits.

    Attributes:
        words: the address of its entry, which is given the address of those that follow.
        addresses: which of the words are addresses of memory.
    """

    words: Sequence[int]
    addresses: Sequence[int]


class Player(Protocol):
    """Makes calls of native code.

    Attributes:
        entry: of any function that takes integers and addresses alone: it is given the function's
            address, then the words.
        most_words: that such a function may take; so many follow its address, whatever it takes.
    """

    entry: int
    most_words: int

    def noting(self) -> AbstractContextManager[Callable[[], Call | None]]:
        """While entered, ops note their calls in this thread.

        The function gives the last call once, or None: the op that was called noted none.
        """

    def play(self, words: NDArray[np.int64]) -> bool:
        """Makes calls, each ``[words in all, entry, words...]``; False as soon as one fails."""
