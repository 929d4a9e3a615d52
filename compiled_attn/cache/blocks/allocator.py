"""Reference counts of all blocks: which are used, cached or free, and which wait for a copy."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable

from compiled_attn.cache.blocks.places import BlockPlaces
from compiled_attn.cache.blocks.prefix import PrefixIndex

__all__ = ["BlockAllocator", "PendingCopies"]


class BlockAllocator:
    """Reference counts over blocks ``1 .. num_blocks - 1``; the null block 0 is never handed out.

    A used block has a reference count above zero. At zero it becomes *cached* where ``index`` knows
    its content, otherwise free. Free blocks are taken lowest place first; only when there is none
    is a cached one evicted, the one whose content was released longest ago. Every operation is
    O(log n) or better.
    Arguments are trusted: ``BlockPool`` checks them.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.refs = array("i", [0]) * num_blocks
        self.copies = PendingCopies()
        self.places = BlockPlaces(num_blocks)
        self.num_allocations = 0
        self.num_copies = 0
        self.num_evictions = 0
        self.peak_used = 0
        self._index = index
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` could hand out now, the free and the cached ones."""
        return self.places.num_free + self.places.num_idle

    def is_shared(self, block: int) -> bool:
        """Whether more than one table holds ``block``; pending copies that read it don't count."""
        return self.refs[block] - self.copies.pins(block) > 1

    def allocate(self) -> int:
        """Return a block with reference count 1. The caller has seen that one is available."""
        if self.places.num_free:
            block = self.places.take()
        else:
            block, _ = self._cached.popitem(last=False)
            self._evict(block)
            self.places.use(block)
        self.num_allocations += 1
        self._note_use(block)
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if self.refs[block]:
            self.refs[block] += 1
        else:
            del self._cached[block]
            self.places.use(block)
            self._note_use(block)

    def release(self, block: int) -> None:
        """Drop a reference; at zero the block becomes cached or free."""
        self.refs[block] -= 1
        if self.refs[block]:
            return
        source = self.copies.cancel(block)
        if source is not None:
            self.release(source)
        if block in self._index:
            self._cached[block] = None
            self.places.idle(block)
            return
        self.places.release(block)
        found = self._index.remove_twin(block)
        if found in self._cached:  # its content was in use until now
            self._cached.move_to_end(found)

    def copy(self, block: int) -> int:
        """Return a fresh block that will be a copy of ``block``, pinned until it is one.

        The caller has seen that a block is available beside ``block`` itself.
        """
        source = self.copies.source(block)
        self.acquire(source)  # first, or the fresh block could be the source, evicted
        fresh = self.allocate()
        self.copies.record(source, fresh)
        self.num_copies += 1
        return fresh

    def can_take_over(self, block: int) -> bool:
        """Whether ``block`` waits for a copy that alone holds its source."""
        source = self.copies.source(block)
        return source != block and self.refs[block] == self.refs[source] == 1

    def take_over(self, block: int) -> int:
        """Cancel the copy into ``block`` and free it; return its source, held in its place.

        What the index knows of the source is evicted, as if it were allocated. The caller has seen
        :meth:`can_take_over`.
        """
        source = self.copies.source(block)
        self.copies.cancel(block)  # whose reference of the source is the table's from now on
        if source in self._index:
            self._evict(source)
        self.release(block)
        return source

    def copied(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let go of the sources of performed copies; ignores what is not pending any more."""
        for source, destination in pairs:
            if destination in self.copies and self.copies.source(destination) == source:
                self.copies.cancel(destination)
                self.release(source)

    def _evict(self, block: int) -> None:
        self._index.remove(block)
        self.num_evictions += 1

    def _note_use(self, block: int) -> None:
        self.refs[block] = 1
        self.peak_used = max(self.peak_used, self.places.num_used)


class PendingCopies:
    """``source -> destination`` pairs; no source is ever a destination, so any order is right.

    A source is pinned until its copies are performed or cancelled; the owner keeps a reference for
    every pin.
    """

    def __init__(self) -> None:
        self._source_of: dict[int, int] = {}
        self._pins: dict[int, int] = {}

    def source(self, block: int) -> int:
        """Return the block with the content of ``block``: itself, unless it waits for a copy."""
        return self._source_of.get(block, block)

    def pins(self, block: int) -> int:
        """Return how many pending copies read ``block``."""
        return self._pins.get(block, 0)

    def record(self, source: int, destination: int) -> None:
        """Add a copy. ``source`` comes from :meth:`source`, ``destination`` is fresh."""
        self._source_of[destination] = source
        self._pins[source] = self.pins(source) + 1

    def cancel(self, destination: int) -> int | None:
        """Forget the copy into ``destination``; return the source it pinned, or None."""
        source = self._source_of.pop(destination, None)
        if source is not None:
            self._unpin(source)
        return source

    def pairs(self) -> list[tuple[int, int]]:
        """Return all ``(source, destination)`` pairs, oldest first."""
        return [(source, destination) for destination, source in self._source_of.items()]

    def __contains__(self, destination: int) -> bool:
        return destination in self._source_of

    def __len__(self) -> int:
        return len(self._source_of)

    def _unpin(self, source: int) -> None:
        if self._pins[source] == 1:
            del self._pins[source]
        else:
            self._pins[source] -= 1
