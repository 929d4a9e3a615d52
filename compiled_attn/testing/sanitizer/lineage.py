"""Tags of the tokens of a request: hashes of the salt and all tokens up to each position."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lineage"]

_MASK = (1 << 64) - 1
_NONE = np.zeros(0, np.int64)
_STEP = 0x9E3779B97F4A7C15


def _mixed(number: int) -> int:
    """SplitMix64 of a number below 2**64."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def _all_mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = numbers ^ numbers >> np.uint64(31)
    return mixed


class Lineage:
    """The tags of a request (1 to 2**31 - 1), extended as it gets tokens.

    Attributes:
        name: the request.
        tags: tag of each position.
        steps: step that last wrote each position; 0: written by another request.
    """

    def __init__(self, name: Hashable, salt: object = None) -> None:
        self.name = name
        self.tags, self.steps = array("i"), array("i")
        self._sum = int.from_bytes(blake2b(repr(salt).encode(), digest_size=8).digest(), "little")
        self._sums = array("Q", [self._sum])  # before each position, and after the last
        self._weight = 0, 0  # number of positions, and the sum of their weights

    def __len__(self) -> int:
        return len(self.tags)

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Adds the tags of positions below ``end``."""
        start = len(self.tags)
        if end == start + 1:  # most steps
            at = (start + 1) * _STEP & _MASK
            self._sum = (self._sum + _mixed((int(tokens[start]) + 1 ^ at) & _MASK)) & _MASK
            self._sums.append(self._sum)
            self.tags.append(max(1, _mixed((self._sum + at) & _MASK) >> 33))
            self.steps.append(0)
        elif end > start:
            steps = np.arange(start + 1, end + 1, dtype=np.uint64) * np.uint64(_STEP)
            ids = np.asarray(tokens[start:end], np.int64).astype(np.uint64) + np.uint64(1)
            sums: NDArray[np.uint64] = np.cumsum(_all_mixed(ids ^ steps), dtype=np.uint64)
            sums += np.uint64(self._sum)
            self._sum = int(sums[-1])
            self._sums.frombytes(sums.tobytes())
            tags = np.maximum(_all_mixed(sums + steps) >> np.uint64(33), np.uint64(1))
            self.tags.frombytes(tags.astype(np.int32).tobytes())
            self.steps.frombytes(bytes(4 * (end - start)))

    def cut(self, end: int) -> NDArray[np.int64]:
        """Removes the positions from ``end`` on, and returns their tags."""
        removed = self.span(end, len(self.tags)) if end < len(self.tags) else _NONE
        if len(removed):
            self._sum = self._sums[end]
            del self.tags[end:], self.steps[end:], self._sums[end + 1 :]
            self._weight = 0, 0
        return removed

    def span(self, start: int, end: int) -> NDArray[np.int64]:
        """Returns the tags of positions ``start .. end - 1``."""
        return np.array(self.tags[start:end], np.int64)

    def sums(self, start: int, end: int, first: int = 0) -> NDArray[np.int64]:
        """Returns cumulative sums of ``tag * (2 * position + 1)`` modulo 2**64 of a range, over the
        positions from ``first`` on.
        """
        before, weight = self._weight
        if before != start:
            weight = int(_weights(self.span(0, start), 0).sum())
        sums: NDArray[np.int64] = np.cumsum(_weights(self.span(start, end), start)) + weight
        self._weight = end, int(sums[-1])
        if first:
            sums -= _weights(self.span(0, first), 0).sum()
        return sums

    def position(self, tag: int) -> int | None:
        """Returns the position of a tag, or None if the request does not have it."""
        return self.tags.index(tag) if tag in self.tags else None


def _weights(tags: NDArray[np.int64], start: int) -> NDArray[np.int64]:
    return tags * (2 * np.arange(start, start + len(tags)) + 1)
