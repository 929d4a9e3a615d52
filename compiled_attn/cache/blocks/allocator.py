"""Reference counts of all blocks, eviction of cached ones, and pending copies."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from compiled_attn.cache.blocks.prefix import PrefixIndex
from compiled_attn.cache.blocks.states import BlockStates

__all__ = ["BlockAllocator", "PendingCopies"]


class BlockAllocator:
    """Reference counts of the blocks ``1 .. num_blocks - 1``.

    A used block has a reference count above zero. At zero it becomes cached if ``index`` finds it
    by its content, otherwise free. The lowest free block is allocated first; if none is free, the
    cached block that was released longest ago is evicted. All operations are O(log n) or better.
    Arguments are trusted: ``BlockPool`` checks them.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.refs = array("i", [0]) * num_blocks
        self.copies = PendingCopies()
        self.states = BlockStates(num_blocks)
        self.num_allocations = 0
        self.num_copies = 0
        self.num_evictions = 0
        self.peak_used = 0
        self._index = index
        # By key and not by block: a move renames blocks, and must keep the order of eviction.
        self._cached: OrderedDict[bytes, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of blocks that :meth:`allocate` can hand out: the free and the cached ones."""
        return self.states.num_free + self.states.num_cached

    def is_shared(self, block: int) -> bool:
        """Whether several tables hold ``block``; pending copies that read it don't count."""
        return self.refs[block] - self.copies.pins(block) > 1

    def allocate(self) -> int:
        """Returns a block with reference count 1; at least one must be available."""
        if self.states.num_free:
            block = self.states.take()
        else:
            key, _ = self._cached.popitem(last=False)
            block = self._index.block(key)
            self._index.remove(block)
            self.states.use(block)
            self.num_evictions += 1
        self.num_allocations += 1
        self._note_use(block)
        return block

    def acquire(self, block: int) -> None:
        """Adds a reference to a used or cached block."""
        if self.refs[block]:
            self.refs[block] += 1
        else:
            key = self._index.key(block)
            assert key is not None
            del self._cached[key]
            self.states.use(block)
            self._note_use(block)

    def release(self, block: int) -> None:
        """Drops a reference; at zero the block becomes cached or free."""
        self.refs[block] -= 1
        if self.refs[block]:
            return
        source = self.copies.cancel(block)
        if source is not None:
            self.release(source)
        key = self._index.key(block)
        if key is not None and self._index.block(key) == block:
            self._cached[key] = None
            self.states.cache(block)
            return
        self.states.release(block)
        if key is not None:
            self._index.remove(block)
            if key in self._cached:  # the same content was used until now
                self._cached.move_to_end(key)

    def withdraw(self, key: bytes) -> None:
        """Removes the block that ``key`` finds from the prefix cache; a cached one becomes free."""
        if key not in self._index:
            return
        block = self._index.block(key)
        if key in self._cached:
            del self._cached[key]
            self.states.release(block)
        self._index.remove(block)

    def copy(self, block: int) -> int:
        """Returns a fresh block that will be a copy of ``block``, which is pinned until then.

        At least one block other than ``block`` must be available.
        """
        source = self.copies.source(block)
        self.acquire(source)  # first, or allocate could evict the source
        fresh = self.allocate()
        self.copies.record(source, fresh)
        self.num_copies += 1
        return fresh

    def copied(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Releases the sources of performed copies; ignores pairs that are not pending."""
        for source, destination in pairs:
            if destination in self.copies and self.copies.source(destination) == source:
                self.copies.cancel(destination)
                self.release(source)

    def exchange(self, pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Renames the two blocks of every pair after their contents moved; returns new ids."""
        checked = self.states.exchange(pairs)
        new_ids: dict[int, int] = {}
        for a, b in checked:
            self.refs[a], self.refs[b] = self.refs[b], self.refs[a]
            new_ids[a], new_ids[b] = b, a
        self._index.rename(new_ids)
        self.copies.rename(new_ids)
        return new_ids

    def counts(self) -> dict[str, int]:
        """Returns the fields of `PoolStats` that this class counts."""
        states = self.states
        return {
            "total": states.num_blocks - 1,
            "used": states.num_used,
            "free": states.num_free,
            "cached": states.num_cached,
            "highest_used": states.highest_used,
            "high_water": states.high_water,
            "peak_used": self.peak_used,
            "allocations": self.num_allocations,
            "evictions": self.num_evictions,
            "copies": self.num_copies,
        }

    def _note_use(self, block: int) -> None:
        self.refs[block] = 1
        self.peak_used = max(self.peak_used, self.states.num_used)


class PendingCopies:
    """``source -> destination`` pairs; no source is ever a destination, so any order is right.

    A source is pinned until its copies are performed or cancelled: the allocator holds one
    reference per pin.
    """

    def __init__(self) -> None:
        self._source_of: dict[int, int] = {}
        self._pins: dict[int, int] = {}

    def source(self, block: int) -> int:
        """Returns the block that holds the content of ``block``: itself unless a copy is due."""
        return self._source_of.get(block, block)

    def pins(self, block: int) -> int:
        """Returns how many pending copies read ``block``."""
        return self._pins.get(block, 0)

    def record(self, source: int, destination: int) -> None:
        """Adds a copy from a block that :meth:`source` returned to a fresh one."""
        self._source_of[destination] = source
        self._pins[source] = self.pins(source) + 1

    def cancel(self, destination: int) -> int | None:
        """Removes the copy into ``destination``; returns the source it pinned, or None."""
        source = self._source_of.pop(destination, None)
        if source is not None:
            self._pins[source] -= 1
            if not self._pins[source]:
                del self._pins[source]
        return source

    def pairs(self) -> list[tuple[int, int]]:
        """Returns all ``(source, destination)`` pairs, oldest first."""
        return [(source, destination) for destination, source in self._source_of.items()]

    def rename(self, new_ids: Mapping[int, int]) -> None:
        """Replaces block ids by new ones."""
        new = new_ids.get
        self._source_of = {new(d, d): new(s, s) for d, s in self._source_of.items()}
        self._pins = {new(source, source): count for source, count in self._pins.items()}

    def __contains__(self, destination: int) -> bool:
        return destination in self._source_of

    def __len__(self) -> int:
        return len(self._source_of)
