"""The tokens that a request has seen, and how often it generated each, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["SeenTokens"]

Ints = NDArray[np.int64]


class SeenTokens:
    """The distinct tokens of a growing text; each new token is counted once, where it stands.

    Args:
        prompt_len: the first tokens of the text, which were not generated.
    """

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._counted = -1  # tokens of the text; -1: they are to be counted from the first on
        self._place: dict[int, int] = {}
        self._ids = self._counts = np.zeros(0, np.int64)

    def of(self, text: Sequence[int]) -> tuple[Ints, Ints]:
        """Ids ``[n]`` of the tokens of a text, and how often each was generated: views.

        Args:
            text: that of the call before, maybe with more tokens.
        """
        counted, self._counted = self._counted, -1  # an interrupt leaves it to be done again
        if counted < 0:
            self._count_all(np.array(text, np.int64))
        else:
            for token in text[counted:]:
                self._count(token)
        self._counted = len(text)
        seen = len(self._place)
        return self._ids[:seen], self._counts[:seen]

    def _count_all(self, text: Ints) -> None:
        ids = np.unique(text)
        generated = np.searchsorted(ids, text[self._prompt_len :])
        self._place = {token: at for at, token in enumerate(ids.tolist())}
        self._ids, self._counts = ids, np.bincount(generated, minlength=len(ids))

    def _count(self, token: int) -> None:
        at = self._place.get(token)
        if at is None:
            at = self._place[token] = len(self._place)
            if at == len(self._ids):
                room = np.zeros(max(at, 64), np.int64)
                self._ids = np.concatenate([self._ids, room])
                self._counts = np.concatenate([self._counts, room])
            self._ids[at] = token
        self._counts[at] += 1
