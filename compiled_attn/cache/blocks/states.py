"""The state of every block: free, used or cached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from compiled_attn.arguments import whole

__all__ = ["BlockSet", "BlockStates"]

_SHIFT = 10
_BITS = 1 << _SHIFT
_FREE, _USED, _CACHED = range(3)


class BlockSet:
    """A set of integers in ``range(size)`` that finds its lowest and highest member quickly.

    Bit ``b`` of word ``w`` stands for member ``1024 * w + b``; bit ``w`` of the summary marks a
    word that is not zero. A call touches one word and the summary, which has 977 bits for a million
    members. Arguments are trusted.

    Args:
        size: one more than the largest member.
        full: start with all members, built in bulk.
    """

    def __init__(self, size: int, *, full: bool = False) -> None:
        whole, rest = divmod(size, _BITS)
        self._words = [_ones(_BITS) if full else 0] * whole
        if rest:
            self._words.append(_ones(rest) if full else 0)
        self._summary = _ones(len(self._words)) if full else 0
        self._count = size if full else 0

    def add(self, member: int) -> None:
        """Adds a member that is not in the set."""
        self._count += 1
        at = member >> _SHIFT
        self._words[at] |= 1 << (member & (_BITS - 1))
        self._summary |= 1 << at

    def remove(self, member: int) -> None:
        """Removes a member that is in the set."""
        self._count -= 1
        at = member >> _SHIFT
        self._words[at] ^= 1 << (member & (_BITS - 1))
        if not self._words[at]:
            self._summary ^= 1 << at

    def lowest(self) -> int:
        """Returns the lowest member of a set that is not empty."""
        at = _lowest_bit(self._summary)
        return at << _SHIFT | _lowest_bit(self._words[at])

    def highest(self) -> int:
        """Returns the highest member of a set that is not empty."""
        at = self._summary.bit_length() - 1
        return at << _SHIFT | self._words[at].bit_length() - 1

    def ascending(self) -> Iterator[int]:
        """Yields the members from the lowest on, at a cost per member that is constant."""
        for at in _bits(self._summary):
            yield from (at << _SHIFT | bit for bit in _bits(self._words[at]))

    def descending(self) -> Iterator[int]:
        """Yields the members from the highest on, at a cost per member that is constant."""
        for at in _bits(self._summary, from_top=True):
            yield from (at << _SHIFT | bit for bit in _bits(self._words[at], from_top=True))

    def __contains__(self, member: int) -> bool:
        return bool(self._words[member >> _SHIFT] >> (member & (_BITS - 1)) & 1)

    def __len__(self) -> int:
        return self._count


def _ones(count: int) -> int:
    return (1 << count) - 1


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1


def _bits(word: int, *, from_top: bool = False) -> Iterator[int]:
    while word:
        bit = word.bit_length() - 1 if from_top else _lowest_bit(word)
        word ^= 1 << bit
        yield bit


class BlockStates:
    """Tracks which blocks are free, used or cached (unused, with content worth keeping).

    The null block 0 is in none of these states. All operations are O(log n) or better; building it
    is O(1) Python work. Blocks to take, use, cache and release are trusted; other errors are raised
    before anything changes. Not thread-safe.

    Args:
        num_blocks: blocks of the cache including the null block, at least 2.

    Attributes:
        num_blocks: as given.
        high_water: the highest block that was ever used, 0 if none was.

    Example::

        states = BlockStates(num_blocks=100)
        first, second = states.take(), states.take()  # 1 and 2
        states.release(first)
        states.compaction(limit=8)  # [(2, 1)]
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = whole("num_blocks (one of them is the null block)", num_blocks, 2)
        self.high_water = 0
        self._state = bytearray(self.num_blocks)
        self._sets = tuple(BlockSet(self.num_blocks, full=s == _FREE) for s in range(3))
        self._sets[_FREE].remove(0)

    @property
    def num_free(self) -> int:
        """Number of free blocks, not counting the null block."""
        return len(self._sets[_FREE])

    @property
    def num_used(self) -> int:
        """Number of used blocks."""
        return len(self._sets[_USED])

    @property
    def num_cached(self) -> int:
        """Number of cached blocks."""
        return len(self._sets[_CACHED])

    @property
    def highest_used(self) -> int:
        """The highest used block, 0 if none is used."""
        used = self._sets[_USED]
        return used.highest() if used else 0

    def has_content(self, block: int) -> bool:
        """Whether ``block`` is used or cached, so that a move must not overwrite it."""
        return self._state[self.valid(block, 1)] != _FREE

    def free_mask(self) -> NDArray[np.bool_]:
        """Which blocks are free, ``[num_blocks]``; the null block counts as one."""
        mask: NDArray[np.bool_] = np.frombuffer(self._state, np.uint8) == _FREE
        return mask

    def take(self) -> int:
        """Marks the lowest free block as used and returns it; at least one must be free."""
        block = self._sets[_FREE].lowest()
        self._change(block, _USED)
        return block

    def use(self, block: int) -> None:
        """Marks a free or cached block as used."""
        self._change(block, _USED)

    def cache(self, block: int) -> None:
        """Marks a used block as cached."""
        self._change(block, _CACHED)

    def release(self, block: int) -> None:
        """Marks a used or cached block as free."""
        self._change(block, _FREE)

    def compaction(self, limit: int) -> list[tuple[int, int]]:
        """Returns at most ``limit`` pairs of blocks whose exchange lowers :attr:`highest_used`.

        Each pair is ``(source, destination)``, with a used source above a destination that is free
        or cached: the highest source with the lowest destination, and so on. No block occurs twice.
        Changes nothing; the cost depends on ``limit`` and not on the number of blocks.
        """
        unused = merge(self._sets[_FREE].ascending(), self._sets[_CACHED].ascending())
        pairs = zip(self._sets[_USED].descending(), unused, strict=False)
        return [
            (source, destination)
            for source, destination in islice(pairs, whole("limit", limit, 0))
            if source > destination
        ]

    def exchange(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Exchanges the states of the two blocks of every pair; returns the pairs as ints.

        Raises:
            ValueError: a block is the null block, out of range, or occurs twice.
        """
        checked = [(self.valid(a, 1), self.valid(b, 1)) for a, b in pairs]
        seen: set[int] = set()
        for block in (block for pair in checked for block in pair):
            if block in seen:
                raise ValueError(
                    f"expected every block once, got block {block} twice: "
                    "split the pairs into several calls"
                )
            seen.add(block)
        for a, b in checked:
            first, second = self._state[a], self._state[b]
            if first != second:
                self._change(a, second)
                self._change(b, first)
        return checked

    def valid(self, block: int, minimum: int = 0) -> int:
        """Returns ``block`` as an int; ``ValueError`` unless ``minimum <= block < num_blocks``."""
        block = whole("block", block, minimum)
        if block >= self.num_blocks:
            raise ValueError(
                f"expected block < {self.num_blocks}, got {block}: it is not in this cache"
            )
        return block

    def _change(self, block: int, state: int) -> None:
        self._sets[self._state[block]].remove(block)
        self._sets[state].add(block)
        self._state[block] = state
        if state == _USED and block > self.high_water:
            self.high_water = block
