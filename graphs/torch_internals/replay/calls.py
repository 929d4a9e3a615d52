"""Native calls as 64-bit words, and the contract of what replays them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Call", "Replayer"]


class Call(NamedTuple):
    """A native call.

    Attributes:
        words: the address of an entry, then its arguments. An entry is a function whose only
            argument is the address of these words.
        addresses: indices of the words that are addresses of memory.
    """

    words: Sequence[int]
    addresses: Sequence[int]


class Replayer(Protocol):
    """Makes native calls.

    Attributes:
        entry: entry for any function that takes only integers and addresses; its arguments are the
            function's address, then that function's arguments, padded to `max_args`.
        max_args: how many arguments such a function may take.
        ops: names of the ops that record their calls, ``namespace::name``. An op that calls one of
            these does not count: it may do more than that.
    """

    entry: int
    max_args: int
    ops: frozenset[str]

    def recording(self) -> AbstractContextManager[Callable[[], Call | None]]:
        """While entered, the ops record their calls in this thread.

        The function returns the last call once, or None if there was none since.
        """

    def call_of(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
    ) -> Call | None:
        """Return a native call that does what another op did, or None.

        Args:
            op: an overload of torch's, which returned ``made`` for ``args`` and ``kwargs``.
        """

    def replay(self, words: NDArray[np.int64]) -> None:
        """Make calls in order, each given as its number of words plus one, then its words.

        Raises:
            RuntimeError: one failed; those after it were not made.
        """
