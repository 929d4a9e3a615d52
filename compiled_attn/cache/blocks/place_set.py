"""An ordered set of small integers as a shallow tree of wide bit words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["PlaceSet"]

_SHIFT = 10
_BITS = 1 << _SHIFT


class PlaceSet:
    """A set of integers in ``range(size)`` that knows its lowest and its highest member.

    Bit ``b`` of word ``w`` stands for member ``1024 * w + b``; a word above it says which words are
    not zero, and so on up to a single word (the shape of a van Emde Boas tree, flattened). A call
    touches one word a level, two levels for a million members, and the set never needs to be
    tidied up. Arguments are trusted.

    Args:
        size: one more than the largest member.
        full: whether all members are there from the start, which is made in bulk.
    """

    def __init__(self, size: int, *, full: bool = False) -> None:
        self._levels: list[list[int]] = []
        self._count = size if full else 0
        while True:
            whole, rest = divmod(size, _BITS)
            words = [(1 << _BITS) - 1 if full else 0] * whole
            self._levels.append(words + ([(1 << rest) - 1 if full else 0] if rest else []))
            size = len(self._levels[-1])
            if size <= 1:
                return

    def add(self, member: int) -> None:
        """Put ``member`` in; it was not there."""
        self._count += 1
        for words in self._levels:
            bit, member = member & (_BITS - 1), member >> _SHIFT
            before = words[member]
            words[member] = before | 1 << bit
            if before:
                return

    def remove(self, member: int) -> None:
        """Take ``member`` out; it was there."""
        self._count -= 1
        for words in self._levels:
            bit, member = member & (_BITS - 1), member >> _SHIFT
            words[member] ^= 1 << bit
            if words[member]:
                return

    def writes(self, changes: Mapping[int, bool]) -> list[tuple[list[int], int, int]]:
        """The assignments ``words[at] = word`` after which each member is there, or not.

        As many members are put in as are taken out, so that the count stays.
        """
        writes: list[tuple[list[int], int, int]] = []
        for words in self._levels:
            changed: dict[int, int] = {}
            for member, present in changes.items():
                at, bit = member >> _SHIFT, 1 << (member & (_BITS - 1))
                word = changed.get(at, words[at])
                changed[at] = word | bit if present else word & ~bit
            writes += [(words, at, word) for at, word in changed.items()]
            changes = {at: bool(word) for at, word in changed.items()}
        return writes

    def lowest(self) -> int:
        """Return the lowest member; the set is not empty."""
        member = 0
        for words in reversed(self._levels):
            word = words[member]
            member = member << _SHIFT | (word & -word).bit_length() - 1
        return member

    def highest(self) -> int:
        """Return the highest member; the set is not empty."""
        member = 0
        for words in reversed(self._levels):
            member = member << _SHIFT | words[member].bit_length() - 1
        return member

    def ascending(self) -> Iterator[int]:
        """Members from the lowest on; each costs the same, however large the set is."""
        return self._members(len(self._levels) - 1, 0, False)

    def descending(self) -> Iterator[int]:
        """Members from the highest on; each costs the same, however large the set is."""
        return self._members(len(self._levels) - 1, 0, True)

    def __contains__(self, member: int) -> bool:
        return bool(self._levels[0][member >> _SHIFT] >> (member & (_BITS - 1)) & 1)

    def __len__(self) -> int:
        return self._count

    def _members(self, level: int, at: int, from_top: bool) -> Iterator[int]:
        word = self._levels[level][at]
        while word:
            bit = (word if from_top else word & -word).bit_length() - 1
            word ^= 1 << bit
            child = at << _SHIFT | bit
            if level:
                yield from self._members(level - 1, child, from_top)
            else:
                yield child
