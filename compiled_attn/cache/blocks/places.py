"""The place of each block in the cache: block ids stay as they are handed out, places change."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge
from itertools import islice, starmap
from operator import call, setitem
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compiled_attn.arguments import whole

__all__ = ["BlockPlaces", "PlaceSet"]

_SHIFT = 10
_BITS = 1 << _SHIFT
_FREE, _USED, _IDLE = range(3)
_NAMES = ("free", "in use", "idle")


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


class BlockPlaces:
    """Which place of the cache each block has, and which places are in use.

    A *block* is the id that tables hold, a *place* the row of the cache where its K/V lies. At
    first block ``b`` lies at place ``b``; :meth:`swap` exchanges places, after the content of the
    cache was exchanged. The null block 0 always is at place 0 and is neither used nor free.

    Every other block is *free* (nothing worth keeping), *used*, or *idle*: not in use, with
    content worth keeping. All operations are O(log n) or better, making it is O(1) Python work.
    Every error is raised before anything changes. Not thread-safe.

    Args:
        num_blocks: blocks of the cache with the null block, at least 2.

    Attributes:
        num_blocks: as given.
        high_water: the highest place that was ever in use, 0 where none was.
        num_swaps: how often places were exchanged: those resolved before are out of date.
        restore: what must happen before the next place is read, or None. A defragmenter that keeps
            the content of blocks outside of the cache for a moment sets it, so that an interrupt
            there loses nothing: called with the place of every block, ``[num_blocks]`` int32, it
            writes them back.

    Example::

        places = BlockPlaces(num_blocks=100)
        first, second = places.take(), places.take()  # blocks 1 and 2, at places 1 and 2
        places.release(first)
        pairs = places.compaction(limit=8)  # [(2, 1)]
        ...  # copy place 2 of the cache to place 1
        places.swap(pairs)
        places.resolve(second)  # 1
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = whole("num_blocks (one of them is the null block)", num_blocks, 2)
        self.high_water = self.num_swaps = 0
        self.restore: Callable[[NDArray[np.int32]], None] | None = None
        self._place_of = array("i", np.arange(self.num_blocks, dtype=np.int32).tobytes())
        self._block_at = self._place_of[:]
        self._place_view: NDArray[np.int32] = np.frombuffer(self._place_of, dtype=np.int32)
        self._state = bytearray(self.num_blocks)  # of each block
        self._sets = tuple(PlaceSet(self.num_blocks, full=s == _FREE) for s in range(3))
        self._sets[_FREE].remove(0)

    @property
    def num_free(self) -> int:
        """Places with nothing worth keeping, the null block not counted."""
        return len(self._sets[_FREE])

    @property
    def num_used(self) -> int:
        """Places in use."""
        return len(self._sets[_USED])

    @property
    def num_idle(self) -> int:
        """Places not in use, with content worth keeping."""
        return len(self._sets[_IDLE])

    @property
    def highest_used(self) -> int:
        """The highest place in use, 0 where none is."""
        used = self._sets[_USED]
        return used.highest() if used else 0

    def resolve(self, block: int) -> int:
        """Return the place of ``block``. Raises ``ValueError`` unless ``0 <= block < num_blocks``.

        A negative id, -1 included, never means the last entry.
        """
        self.settle()
        return self._place_of[self._valid("block", block)]

    def unresolve(self, place: int) -> int:
        """Return the block at ``place``. Raises ``ValueError`` outside of ``range(num_blocks)``."""
        self.settle()
        return self._block_at[self._valid("place", place)]

    def resolve_all(self, blocks: ArrayLike) -> NDArray[np.signedinteger[Any]]:
        """Return the places of ``blocks``, a new array of the same shape; padding 0 stays 0.

        Args:
            blocks: ids of any shape (a block table), integers in ``range(num_blocks)``.

        Returns:
            Places of the shape of ``blocks``, int32 where ``blocks`` is int32, else int64.

        Raises:
            TypeError: the ids are not integers.
            ValueError: an id is negative or too large.
        """
        self.settle()
        ids = np.asarray(blocks)
        if not ids.size:
            ids = ids.astype(np.int64 if ids.dtype.kind == "f" else ids.dtype)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"expected integer blocks, got {ids.dtype}: pass block ids")
        for extreme in (ids.min(initial=0), ids.max(initial=0)):
            self._valid("block", int(extreme))
        places: NDArray[np.int32] = self._place_view[ids]
        return places if ids.dtype == np.int32 else places.astype(np.int64)

    def is_worth_keeping(self, place: int) -> bool:
        """Whether ``place`` is used or idle, so that a move must not overwrite it."""
        return self._state[self._block_at[self._valid("place", place, 1)]] != _FREE

    def take(self) -> int:
        """Return the block at the lowest free place, which is in use from now on.

        Raises ``RuntimeError`` where no place is free.
        """
        free = self._sets[_FREE]
        if not free:
            raise RuntimeError(
                f"expected a free block, got {self.num_used} used and {self.num_idle} idle of "
                f"{self.num_blocks - 1}: release one first"
            )
        block = self._block_at[free.lowest()]
        self._change(block, _USED)
        return block

    def use(self, block: int) -> None:
        """Note that a free or idle ``block`` is in use; one that is already is a ``ValueError``."""
        self._change(self._checked(block, _FREE, _IDLE), _USED)

    def idle(self, block: int) -> None:
        """Note that ``block`` is used no more and worth keeping; it must be in use."""
        self._change(self._checked(block, _USED), _IDLE)

    def release(self, block: int) -> None:
        """Note that ``block`` is free: nothing in it is worth keeping; it must not be free."""
        self._change(self._checked(block, _USED, _IDLE), _FREE)

    def compaction(self, limit: int) -> list[tuple[int, int]]:
        """Return at most ``limit`` pairs of places whose exchange lowers :attr:`highest_used`.

        Each pair is ``(source, destination)`` with the source in use, the destination not in use
        (free or idle) and below it: the highest source with the lowest destination, and so on. No
        place is in two pairs. Changes nothing; the cost grows with ``limit`` and not with the
        number of blocks.
        """
        self.settle()
        unused = merge(self._sets[_FREE].ascending(), self._sets[_IDLE].ascending())
        pairs = zip(self._sets[_USED].descending(), unused, strict=False)
        return [
            (source, destination)
            for source, destination in islice(pairs, whole("limit", limit, 0))
            if source > destination
        ]

    def swap(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Exchange the blocks of each two places, whatever their state; all pairs, or none.

        Call it once the content of the cache was exchanged, or moved where
        :meth:`is_worth_keeping` denies the destination.

        Args:
            pairs: ``(place, place)``, each in ``range(1, num_blocks)`` and none twice.

        Raises:
            ValueError: a place is the null block's, out of range, or in two pairs.
        """
        checked = [(self._valid("place", a, 1), self._valid("place", b, 1)) for a, b in pairs]
        seen: set[int] = set()
        for place in (place for pair in checked for place in pair):
            if place in seen:
                raise ValueError(
                    f"expected every place once, got place {place} twice: "
                    "split the pairs into several swaps"
                )
            seen.add(place)
        # One call of C code makes all assignments: no interrupt can come between two of them.
        deque(starmap(call, self._assignments(checked)), maxlen=0)

    def settle(self) -> None:
        """Call :attr:`restore`, where there is one, and forget it."""
        if self.restore is not None:
            self.restore(self._place_view)
            self.restore = None

    def _assignments(self, pairs: list[tuple[int, int]]) -> list[tuple[Any, ...]]:
        """Calls, function and arguments, that exchange the blocks of each two places."""
        calls: list[tuple[Any, ...]] = []
        changes: list[dict[int, bool]] = [{}, {}, {}]  # of the sets of free, used and idle places
        high_water = self.high_water
        for a, b in pairs:
            x, y = self._block_at[a], self._block_at[b]
            calls += [(setitem, self._block_at, a, y), (setitem, self._block_at, b, x)]
            calls += [(setitem, self._place_of, x, b), (setitem, self._place_of, y, a)]
            if self._state[x] != self._state[y]:
                changes[self._state[x]] |= {a: False, b: True}
                changes[self._state[y]] |= {b: False, a: True}
            for block, place in ((x, b), (y, a)):
                if self._state[block] == _USED:
                    high_water = max(high_water, place)
        for members, changed in zip(self._sets, changes, strict=True):
            calls += [(setitem, *write) for write in members.writes(changed)]
        calls += [(setattr, self, "num_swaps", self.num_swaps + 1)]
        return [*calls, (setattr, self, "high_water", high_water)]

    def _change(self, block: int, state: int) -> None:
        place = self._place_of[block]
        self._sets[self._state[block]].remove(place)
        self._sets[state].add(place)
        self._state[block] = state
        if state == _USED and place > self.high_water:
            self.high_water = place

    def _checked(self, block: int, *states: int) -> int:
        block = self._valid("block", block, 1)
        if self._state[block] not in states:
            wanted = " or ".join(_NAMES[state] for state in states)
            raise ValueError(
                f"expected a block that is {wanted}, got block {block}, which is "
                f"{_NAMES[self._state[block]]}: a block changes its state once"
            )
        return block

    def _valid(self, name: str, number: int, minimum: int = 0) -> int:
        number = whole(name, number, minimum)
        if number >= self.num_blocks:
            raise ValueError(
                f"expected {name} < {self.num_blocks}, got {number}: it is not in this cache"
            )
        return number
