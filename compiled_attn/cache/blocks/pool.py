"""The blocks of a paged KV cache, and the requests that hold them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.allocator import BlockAllocator
from compiled_attn.cache.blocks.partial_hits import least_partial
from compiled_attn.cache.blocks.places import BlockPlaces
from compiled_attn.cache.blocks.prefix import PrefixIndex, PrefixMatch, PromptKeys, Salt, Tokens
from compiled_attn.cache.blocks.stats import PoolStats
from compiled_attn.cache.blocks.table import BlockTable
from compiled_attn.errors import DuplicateRequest, OutOfBlocks, UnknownRequest

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out the blocks of a paged KV cache to requests and shares equal prefixes between them.

    Every block is free, used with a reference count, or cached: held by no request, but found by
    its content until the pool evicts it. Block 0 is the null block, the target of all padding, and
    is never handed out. Free blocks are taken lowest place first; cached ones are evicted only when
    no free one is left, the least recently used chain first and its last block first. A call costs
    O(log n) per block it touches; making the pool costs O(1) Python work.

    A request goes through ``add`` -> (``reserve`` -> write K/V on the device -> ``commit``)* ->
    ``free``. Where ``add`` or ``reserve`` decided on a copy (a partial hit, or after ``fork``), the
    pairs of ``pending_copies`` are copied before K/V is written. Every error leaves the pool as it
    was. Not thread-safe.

    Block ids never change. Where the cache is defragmented, ``places`` says in which row of the
    cache a block lies; without, every block lies at the row of its id.

    Args:
        num_blocks: blocks of the cache with the null block, at least 2.
        block_size: slots (tokens) in a block, at least 1.
        partial_hits: whether a prompt also shares the beginning of a block, by a copy of it. The
            pool then remembers the tokens of cached blocks, 8 bytes each.
        min_partial_tokens: tokens that a partial hit must save to be worth a copy, between 1 and
            ``block_size - 1``; default a quarter of a block. A block that is being filled can be
            found each time it has gained as many.
        key: of the hash that finds prefixes, 1 to 64 secret bytes; None draws a random one for this
            pool. Give one where digests must be equal in several processes.

    Attributes:
        refcounts: live, read-only, ``[num_blocks]`` int32; a pending copy counts for its source.

    Example::

        pool = BlockPool(num_blocks=100, block_size=16)
        table = pool.add("a", prompt)
        pool.reserve("a", len(prompt))  # allocates what was not found in the prefix cache
        ...  # compute positions num_computed .. len(prompt) - 1 into table.slot(position)
        pool.commit("a", prompt, len(prompt))  # later requests find the full blocks
        pool.free("a")
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        partial_hits: bool = False,
        min_partial_tokens: int | None = None,
        key: bytes | None = None,
    ) -> None:
        self.num_blocks = whole("num_blocks (one of them is the null block)", num_blocks, 2)
        self.block_size = whole("block_size", block_size, 1)
        worth = least_partial(self.block_size, min_partial_tokens)
        self._index = PrefixIndex(self.block_size, worth if partial_hits else None, key=key)
        self._blocks = BlockAllocator(self.num_blocks, self._index)
        self._tables: dict[Hashable, BlockTable] = {}
        self.refcounts: NDArray[np.int32] = np.frombuffer(self._blocks.refs, dtype=np.int32)
        self.refcounts.flags.writeable = False
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._partial_hit_tokens = 0
        self._num_preemptions = 0

    @property
    def available(self) -> int:
        """Blocks that could be reserved now: the free and the cached ones."""
        return self._blocks.available

    @property
    def highest_used(self) -> int:
        """The highest place in use now, 0 where none is; without swaps the highest block id."""
        return self._blocks.places.highest_used

    @property
    def places(self) -> BlockPlaces:
        """Where each block lies in the cache: resolve and swap, leave the states to the pool."""
        return self._blocks.places

    @property
    def requests(self) -> list[Hashable]:
        """Ids of all requests in the pool, oldest first."""
        return list(self._tables)

    @property
    def num_requests(self) -> int:
        """How many requests are in the pool."""
        return len(self._tables)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._tables

    def table(self, request_id: Hashable) -> BlockTable:
        """Return the table of a request, the same object all its life; or ``UnknownRequest``."""
        table = self._tables.get(request_id)
        if table is None:
            raise UnknownRequest(request_id)
        return table

    def prompt(self, tokens: Tokens, *, salt: Salt = None) -> PromptKeys:
        """Return what `add` and `can_allocate` take for these tokens and this salt, hashed once.

        For a request that waits: what is cached is looked up anew in each call. The tokens must
        stay as they are.
        """
        return PromptKeys(self._index, tokens, salt)

    def add(
        self,
        request_id: Hashable,
        tokens: Tokens | PromptKeys | None = None,
        *,
        salt: Salt = None,
    ) -> BlockTable:
        """Register a request; hold the blocks of the longest cached prefix of its prompt.

        At most ``len(tokens) - 1`` tokens are found: the last one is always computed, because its
        logits are needed. Full blocks are shared. With ``partial_hits`` a block that begins with
        the next tokens is copied into a fresh one (see ``pending_copies``), if there is one: this
        never runs out of blocks.

        Args:
            request_id: any hashable name that is not in the pool.
            tokens: prompt token ids ``[n]``, list or integer array, or what :meth:`prompt` gave;
                None looks nothing up.
            salt: extra key; only requests with the same salt share blocks. A :meth:`prompt` has
                one.

        Returns:
            The table, with ``length == num_computed == num_cached_tokens`` positions found.

        Raises:
            DuplicateRequest: the id is in the pool.
        """
        if request_id in self._tables:
            raise DuplicateRequest(request_id)
        table = BlockTable(request_id, self.block_size, self._index.root(salt))
        if tokens is not None:
            prompt = self._own(tokens, salt)
            count = len(prompt.tokens)
            self._take_hits(table, self._index.longest(prompt, limit=max(0, count - 1)))
            self._queried_tokens += count
            self._hit_tokens += table.num_cached_tokens
        self._tables[request_id] = table
        return table

    def can_allocate(
        self, length: int, tokens: Tokens | PromptKeys | None = None, *, salt: Salt = None
    ) -> bool:
        """Whether ``add`` and then ``reserve`` of a new request would fit now; no side effects.

        Exact. A partial hit makes no difference: it takes a block that is needed anyway.
        """
        needed = -(-whole("length", length, 0) // self.block_size)
        hits: list[int] = []
        if tokens is not None:
            prompt = self._own(tokens, salt)
            hits = self._index.match(prompt, limit=max(0, len(prompt.tokens) - 1))
        idle = len(hits) - int(np.count_nonzero(self.refcounts[hits])) if hits else 0
        return needed - len(hits) <= self.available - idle

    def can_reserve(self, request_id: Hashable, length: int) -> bool:
        """Whether ``reserve(request_id, length)`` would succeed now; no side effects."""
        table = self.table(request_id)
        return table._fits(table._needs(whole("length", length, 0), self._blocks), self._blocks)

    def reserve(self, request_id: Hashable, length: int) -> list[int]:
        """Make the table hold positions ``< length``; all missing blocks are allocated, or none.

        A partly filled last block that another table shares is replaced by a fresh one, and the
        copy that this takes is added to ``pending_copies``. Full shared blocks are never copied.
        Where the pool is one block short, a last block that waits for a copy is replaced by the
        source of that copy, uncopied, if no other request holds it. A ``length`` that the table
        already holds changes nothing; a table never shrinks.

        Returns:
            The ids that are new in the table, the replacement of the last block first.

        Raises:
            OutOfBlocks: the free and cached blocks don't suffice.
        """
        table = self.table(request_id)
        length = whole("length", length, 0)
        needed = table._needs(length, self._blocks)
        if not table._fits(needed, self._blocks):
            places = self.places
            raise OutOfBlocks(
                request_id, length, needed, places.num_free, places.num_idle, self.num_blocks - 1
            )
        added = table._grow(needed, self._blocks) if needed else []
        table.length = max(table.length, length)
        return added

    def try_reserve(self, request_id: Hashable, length: int) -> bool:
        """``reserve`` where that would succeed; else False, and nothing changes."""
        table = self._tables.get(request_id)
        if table is not None and table._extends_in_place(length, self._blocks):
            table.length = length
            return True
        if not self.can_reserve(request_id, length):
            return False
        self.reserve(request_id, length)
        return True

    def append(self, request_id: Hashable, n: int = 1) -> list[int]:
        """Reserve ``n`` more positions: ``reserve(request_id, length + n)``."""
        return self.reserve(request_id, self.table(request_id).length + whole("n", n, 0))

    def commit(self, request_id: Hashable, tokens: Tokens, length: int) -> int:
        """Declare that positions ``< length`` hold K/V of ``tokens``: full blocks can be found.

        The cost is that of the blocks that became full since the last commit. Where another block
        with the same content can already be found, that one stays the one that is found.

        Args:
            request_id: the request that was computed.
            tokens: all token ids of the request so far, prompt included, ``[>= length]``. What was
                committed before is not looked at again.
            length: between ``num_computed`` and ``length`` of the table.

        Returns:
            The length from which on a commit lets more be found: those below it tell nothing, and
            may be left out.

        Raises:
            ValueError: ``length`` or ``tokens`` don't fit the table.
            RuntimeError: a block that was written still waits for its copy (``pending_copies``).
        """
        table = self.table(request_id)
        # Most steps add a token in the middle of a block, which the index need not know.
        is_plain = type(length) is int and type(tokens) is list
        is_quiet = is_plain and table.num_computed <= length < table._quiet_below
        if is_quiet and length <= min(table.length, len(tokens)) and not self._blocks.copies:
            table.num_computed = length
            return table._quiet_below
        length = whole("length", length, 0)
        table._check_commit(tokens, length, self._blocks.copies)
        table._publish(self._index, tokens, length)
        table.num_computed = length
        table._quiet_below = self._index.next_findable(length)
        return table._quiet_below

    def withdraw(self, request_id: Hashable, first: int = 0) -> None:
        """Let no later prompt find the blocks that a request holds: they hold NaN, say.

        Nor what it, or a fork of it from now on, computes later. Requests that hold the blocks
        already keep them. Where another block has the same content, that one is found instead.

        Args:
            request_id: the request.
            first: its first block that is withdrawn; those before it can be found as before.
        """
        self.table(request_id)._withdraw(self._index, whole("first", first, 0))

    def fork(self, parent_id: Hashable, child_id: Hashable) -> BlockTable:
        """Register ``child_id`` with blocks, positions and salt of ``parent_id``; copies nothing.

        Positions reserved so far belong to both, and both expect the same tokens there. Whoever of
        them first reserves further into a partly filled last block gets a copy of it.

        Raises:
            UnknownRequest: the parent is not in the pool.
            DuplicateRequest: the child is.
        """
        parent = self.table(parent_id)
        if child_id in self._tables:
            raise DuplicateRequest(child_id)
        child = BlockTable(child_id, self.block_size, parent._key)
        self._hold(child, parent.blocks)
        child._num_keyed = parent._num_keyed
        child.length, child.num_computed = parent.length, parent.num_computed
        self._tables[child_id] = child
        return child

    def pending_copies(self) -> list[tuple[int, int]]:
        """Return the ``(source, destination)`` block copies to perform, oldest first.

        The caller copies K and V of all layers before any K/V of the next step is written, and then
        says so with :meth:`copied`. Until then they stay pending: where the copying fails or is
        interrupted, they are performed again. No destination is the source of another pair, so they
        may run in any order or at once.
        """
        return self._blocks.copies.pairs()

    def copied(self, pairs: Iterable[tuple[int, int]] | NDArray[np.integer[Any]]) -> None:
        """Note that copies of :meth:`pending_copies` were performed; lets go of their sources.

        Call it before the next call that changes the pool. A pair that is not pending (any more) is
        ignored.

        Raises:
            TypeError, ValueError: ``pairs`` are not pairs of block ids.
        """
        self._blocks.copied([(whole("source", s, 0), whole("destination", d, 0)) for s, d in pairs])

    def pop_copies(self) -> list[tuple[int, int]]:
        """:meth:`pending_copies` and :meth:`copied` in one, where nothing can fail to copy."""
        pairs = self.pending_copies()
        self._blocks.copied(pairs)
        return pairs

    def free(self, request_id: Hashable) -> None:
        """Give up all blocks of a finished request, whose table becomes empty.

        Committed blocks that can be found stay cached. The id can be added again at once. Raises
        ``UnknownRequest``, also on the second call.
        """
        table = self.table(request_id)
        # Last block first, so that within a chain the tail is evicted before what leads to it; and
        # block by block, so that a call that was interrupted can be repeated.
        while table.blocks:
            self._blocks.release(table.blocks.pop())
        table._clear()
        del self._tables[request_id]

    def preempt(self, request_id: Hashable) -> None:
        """``free`` a request that is to come back, and count it.

        The pool forgets the id. To resume, ``add`` it again with the prompt *and* what was
        generated: whatever was not evicted in between is found in the prefix cache, the rest is
        recomputed.
        """
        self.free(request_id)
        self._num_preemptions += 1

    def stats(self) -> PoolStats:
        """Return the figures of this moment; O(number of requests)."""
        blocks, places = self._blocks, self._blocks.places
        last = {t.blocks[-1]: t.fragmentation for t in self._tables.values() if t.blocks}
        return PoolStats(
            total=self.num_blocks - 1,
            used=places.num_used,
            free=places.num_free,
            cached=places.num_idle,
            requests=len(self._tables),
            highest_used=places.highest_used,
            high_water=places.high_water,
            peak_used=blocks.peak_used,
            allocations=blocks.num_allocations,
            evictions=blocks.num_evictions,
            copies=blocks.num_copies,
            preemptions=self._num_preemptions,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            partial_hit_tokens=self._partial_hit_tokens,
            fragmented_slots=sum(last.values()),
        )

    def __repr__(self) -> str:
        p = self.places
        return (
            f"BlockPool(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"used={p.num_used}, free={p.num_free}, cached={p.num_idle})"
        )

    def _hold(self, table: BlockTable, blocks: list[int]) -> None:
        for block in blocks:
            self._blocks.acquire(block)
        table._extend(blocks)

    def _own(self, tokens: Tokens | PromptKeys, salt: Salt) -> PromptKeys:
        if not isinstance(tokens, PromptKeys):
            return PromptKeys(self._index, tokens, salt)
        if tokens.index is not self._index:
            raise ValueError(
                "expected a prompt of this pool, got one of another, whose hash differs: make it "
                "with prompt() of the pool that is asked"
            )
        return tokens

    def _take_hits(self, table: BlockTable, match: PrefixMatch) -> None:
        self._hold(table, match.blocks)
        table._key, table._num_keyed = match.key, len(match.blocks)
        found = len(match.blocks) * self.block_size
        if match.source and self.available > (not self._blocks.refs[match.source]):
            table._extend([self._blocks.copy(match.source)])
            self._partial_hit_tokens += match.num_partial
            found += match.num_partial
        table.num_cached_tokens = table.num_computed = table.length = found
