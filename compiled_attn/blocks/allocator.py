"""The state of every single block: free, used with a reference count, or cached."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from compiled_attn.blocks.copies import PendingCopies
from compiled_attn.blocks.free_list import FreeList, HighestUsed
from compiled_attn.blocks.prefix import PrefixIndex

__all__ = ["BlockAllocator"]


class BlockAllocator:
    """Reference counts over blocks ``1 .. num_blocks - 1``; the null block 0 is never handed out.

    A used block has a reference count above zero. At zero it becomes *cached* where ``index`` knows
    its content, otherwise free. Free blocks are taken lowest id first; only when there is none is a
    cached one evicted, the one released longest ago. Every operation is O(log n) or better.
    Arguments are trusted: ``BlockPool`` checks them.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.refs = array("i", bytes(4 * num_blocks))
        self.copies = PendingCopies()
        self.num_allocations = 0
        self.num_evictions = 0
        self.peak_used = 0
        self.high_water = 0
        self._usable = num_blocks - 1
        self._index = index
        self._free = FreeList(1, num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._highest = HighestUsed(self.refs)

    @property
    def num_free(self) -> int:
        """Free blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and the index still knows."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with a reference count above zero."""
        return self._usable - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def highest_used(self) -> int:
        """The highest block id in use, 0 where none is."""
        return self._highest.get()

    def is_shared(self, block: int) -> bool:
        """Whether more than one table holds ``block``; pending copies that read it don't count."""
        return self.refs[block] - self.copies.pins(block) > 1

    def allocate(self) -> int:
        """Return a block with reference count 1. The caller has seen that one is available."""
        if self._free:
            block = self._free.take()
        else:
            block, _ = self._cached.popitem(last=False)
            self._index.remove(block)
            self.num_evictions += 1
        self.num_allocations += 1
        self.high_water = max(self.high_water, block)
        self._use(block)
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if self.refs[block]:
            self.refs[block] += 1
        else:
            del self._cached[block]
            self._use(block)

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
        else:
            self._free.give(block)

    def copy(self, block: int) -> int:
        """Give up one reference of a shared ``block`` for a fresh block that will be its copy."""
        source = self.copies.source(block)
        fresh = self.allocate()
        self.acquire(source)
        self.copies.record(source, fresh)
        self.release(block)
        return fresh

    def pop_copies(self) -> list[tuple[int, int]]:
        """Return the pending ``(source, destination)`` copies and let go of their sources."""
        pairs = self.copies.pop()
        for source, _ in pairs:
            self.release(source)
        return pairs

    def _use(self, block: int) -> None:
        self.refs[block] = 1
        self._highest.add(block)
        self.peak_used = max(self.peak_used, self.num_used)
