"""Calls of native code in words of 64 bits, and the contract of what makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Call", "Player"]


class Call(NamedTuple):
    """A call.

    Attributes:
        words: the address of an entry, then its arguments. An entry is a function that takes one
            argument: where these words are.
        addresses: which of the words are addresses of memory.
    """

    words: Sequence[int]
    addresses: Sequence[int]


class Player(Protocol):
    """Makes calls.

    Attributes:
        entry: of any function that takes integers and addresses alone; its arguments are the
            function's address, and what that takes.
        most_words: that such a function may take; so many follow its address, whatever it takes.
        ops: names of the ops that note their calls, ``namespace::name``. An op that calls one of
            these does not count: it may do something beside.
    """

    entry: int
    most_words: int
    ops: frozenset[str]

    def noting(self) -> AbstractContextManager[Callable[[], Call | None]]:
        """While entered, these ops note their calls in this thread.

        The function gives the last call once, or None where none was noted since.
        """

    def call_of(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
    ) -> Call | None:
        """The call of its own that does what another op did; None: it has none.

        Args:
            op: an overload of torch's, which returned ``made`` of ``args`` and ``kwargs``.
        """

    def play(self, words: NDArray[np.int64]) -> None:
        """Makes calls, each as the number of its words and of this one, and its words.

        Raises:
            RuntimeError: one failed, and none behind it was made.
        """
