"""The blocks of a paged KV cache and the requests that hold them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.allocator import BlockAllocator
from compiled_attn.cache.blocks.prefix import PrefixIndex, PromptKeys, Salt, Tokens
from compiled_attn.cache.blocks.stats import PoolStats
from compiled_attn.cache.blocks.table import BlockTable
from compiled_attn.errors import DuplicateRequest, OutOfBlocks, UnknownRequest

__all__ = ["BlockPool"]


class BlockPool:
    """Allocates the blocks of a paged KV cache to requests and shares equal prefixes among them.

    Every block is free, used with a reference count, or cached: held by no request, but found by
    its content until it is evicted. Block 0 is the null block, the target of all padding, and is
    never allocated. The lowest free block is allocated first; cached blocks are evicted only when
    none is free, the least recently used chain first and its last block first. A call costs
    O(log n) per block it touches.

    A request goes through ``add`` -> (``reserve`` -> write K/V on the device -> ``commit``)* ->
    ``free``. After ``fork`` the caller copies the pairs of ``pending_copies`` before it writes K/V.
    Every error leaves the pool as it was. Not thread-safe.

    Block ids are physical: rows of the cache. A defragmenter that moves blocks renames them with
    ``exchange``, in all tables at once.

    Args:
        num_blocks: blocks of the cache including the null block, at least 2.
        block_size: slots (tokens) in a block, at least 1.
        key: hash key of the prefix cache, 1 to 64 secret bytes; None draws a random one for this
            pool. Set it if digests must be equal in several processes.
        window: tokens that a token sees, itself included, if all layers have a sliding window: a
            prefix is found if its blocks in the last window are. None: no limit.

    Attributes:
        refcounts: live, read-only, ``[num_blocks]`` int32; a pending copy counts for its source.
        num_exchanges: how often blocks were renamed: ids read from a table before are out of date.

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
        key: bytes | None = None,
        window: int | None = None,
    ) -> None:
        self.num_blocks = whole("num_blocks (one of them is the null block)", num_blocks, 2)
        self.block_size = whole("block_size", block_size, 1)
        self.num_exchanges = 0
        self._index = PrefixIndex(self.block_size, key=key, window=window)
        self.window = self._index.window
        self._blocks = BlockAllocator(self.num_blocks, self._index)
        self._tables: dict[Hashable, BlockTable] = {}
        self.refcounts: NDArray[np.int32] = np.frombuffer(self._blocks.refs, dtype=np.int32)
        self.refcounts.flags.writeable = False
        self._queried_tokens = self._hit_tokens = self._num_preemptions = 0

    @property
    def available(self) -> int:
        """Number of blocks that can be reserved now: the free and the cached ones."""
        return self._blocks.available

    @property
    def released_window(self) -> int | None:
        """The window before which blocks of a running request are released; None: none are."""
        return self.window

    @property
    def num_used(self) -> int:
        """Number of used blocks."""
        return self._blocks.states.num_used

    @property
    def highest_used(self) -> int:
        """The highest used block, 0 if none is used."""
        return self._blocks.states.highest_used

    @property
    def requests(self) -> list[Hashable]:
        """Ids of all requests in the pool, oldest first."""
        return list(self._tables)

    @property
    def num_requests(self) -> int:
        """Number of requests in the pool."""
        return len(self._tables)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._tables

    def table(self, request_id: Hashable) -> BlockTable:
        """Returns the table of a request, the same object all its life; or ``UnknownRequest``."""
        table = self._tables.get(request_id)
        if table is None:
            raise UnknownRequest(request_id)
        return table

    def prompt(self, tokens: Tokens, *, salt: Salt = None) -> PromptKeys:
        """Returns the hashed form of a prompt, which must not change, for `add` and `can_allocate`:
        tokens are hashed once, blocks looked up on every call.
        """
        return PromptKeys(self._index, tokens, salt)

    def add(
        self, request_id: Hashable, tokens: Tokens | PromptKeys | None = None, *, salt: Salt = None
    ) -> BlockTable:
        """Registers a request, which then shares the longest cached prefix of full blocks.

        At most ``len(tokens) - 1`` tokens are found: the last one's logits are needed.

        Args:
            request_id: any hashable name that is not in the pool.
            tokens: prompt token ids ``[n]``, list or integer array, or the result of
                :meth:`prompt`; None looks nothing up.
            salt: extra key; only requests with equal salts share blocks. A :meth:`prompt` has its
                own.

        Returns:
            The table, with ``length == num_computed == num_cached_tokens`` positions found.

        Raises:
            DuplicateRequest: the id is in the pool.
        """
        if request_id in self._tables:
            raise DuplicateRequest(request_id)
        table = BlockTable(request_id, self.block_size, self._index.root(salt))
        if tokens is not None:
            prompt = self._index.prompt(tokens, salt)
            blocks, key = self._match(prompt)
            table._skip(prompt.keys(blocks.count(0)))
            self._hold(table, blocks)
            table._key, table._num_keyed = key, len(blocks)
            table.num_cached_tokens = table.num_computed = len(blocks) * self.block_size
            table.length = table.num_computed
            self._queried_tokens += len(prompt.tokens)
            self._hit_tokens += table.num_cached_tokens
        self._tables[request_id] = table
        return table

    def can_allocate(
        self,
        length: int,
        tokens: Tokens | PromptKeys | None = None,
        *,
        salt: Salt = None,
        at_once: int | None = None,
    ) -> bool:
        """Whether ``add`` and then ``reserve`` of a new request would succeed; no side effects.

        ``at_once``: blocks that it holds at most at a time, see `release_before`; None: all.
        """
        needed = -(-whole("length", length, 0) // self.block_size)
        hits = [] if tokens is None else self._match(self._index.prompt(tokens, salt))[0]
        needed -= len(hits)
        hits = hits[hits.count(0) :]
        if at_once is not None:
            needed = min(needed, at_once - len(hits))
        cached = len(hits) - int(np.count_nonzero(self.refcounts[hits])) if hits else 0
        return needed <= self._blocks.available - cached

    def can_reserve(self, request_id: Hashable, length: int) -> bool:
        """Whether ``reserve(request_id, length)`` would succeed; no side effects."""
        table = self.table(request_id)
        return table._blocks_needed(whole("length", length, 0), self._blocks) <= self.available

    def reserve(self, request_id: Hashable, length: int) -> list[int]:
        """Makes the table hold positions ``< length``: allocates all missing blocks, or none.

        A partly filled last block that another table shares is replaced by a fresh one, and the
        copy is added to ``pending_copies``. Full shared blocks are never copied. A ``length`` that
        the table already holds changes nothing; a table never shrinks.

        Returns:
            The ids that are new in the table, the replacement of the last block first.

        Raises:
            OutOfBlocks: too few blocks are free or cached.
        """
        table = self.table(request_id)
        length = whole("length", length, 0)
        needed = table._blocks_needed(length, self._blocks)
        if needed > self.available:
            s = self._blocks.states
            raise OutOfBlocks(
                request_id, length, needed, s.num_free, s.num_cached, self.num_blocks - 1
            )
        added = table._grow(needed, self._blocks) if needed else []
        table.length = max(table.length, length)
        return added

    def try_reserve(self, request_id: Hashable, length: int) -> bool:
        """Calls ``reserve`` if that would succeed; else returns False and changes nothing."""
        table = self._tables.get(request_id)
        if table is not None and table._fits_last_block(length, self._blocks):
            table.length = length
            return True
        if not self.can_reserve(request_id, length):
            return False
        self.reserve(request_id, length)
        return True

    def append(self, request_id: Hashable, n: int = 1) -> list[int]:
        """Reserves ``n`` more positions: ``reserve(request_id, length + n)``."""
        return self.reserve(request_id, self.table(request_id).length + whole("n", n, 0))

    def chunk_end(self, start: int, end: int, *, is_last: bool) -> int:
        """Returns where a chunk that may end at ``end`` does; earlier only for `HybridPool`."""
        return end

    def commit(self, request_id: Hashable, tokens: Tokens, length: int) -> int:
        """Declares that positions ``< length`` hold K/V of ``tokens``, and indexes full blocks.

        The cost is that of the blocks that became full since the last commit. If another block
        with the same content is indexed already, prompts keep finding that one.

        Args:
            request_id: the request that was computed.
            tokens: all token ids of the request so far, including the prompt, ``[>= length]``.
                Those committed before are not read again.
            length: between ``num_computed`` and ``length`` of the table.

        Returns:
            The smallest length at which another block is full: the caller may skip commits below.

        Raises:
            ValueError: ``length`` or ``tokens`` don't fit the table.
            RuntimeError: a written block still waits for its copy (``pending_copies``).
        """
        table = self.table(request_id)
        # Most steps add a token in the middle of a block, which changes nothing in the index.
        is_plain = type(length) is int and type(tokens) is list
        is_partial = is_plain and table.num_computed <= length < table._next_full
        if is_partial and length <= min(table.length, len(tokens)) and not self._blocks.copies:
            table.num_computed = length
            return table._next_full
        length = whole("length", length, 0)
        table._check_commit(tokens, length, self._blocks.copies)
        table._publish(self._index, tokens, length)
        table.num_computed = length
        table._next_full = length - length % self.block_size + self.block_size
        return table._next_full

    def withdraw(self, request_id: Hashable, first: int = 0) -> None:
        """Removes the blocks of a request from the prefix cache, e.g. because they hold NaN.

        Nothing that the request, or a later fork of it, computes from now on is indexed either.
        Requests that hold the blocks keep them. If another block has the same content, prompts find
        that one. For a released block, what its content finds now is withdrawn.

        Args:
            request_id: the request.
            first: index of its first block that is withdrawn; earlier ones stay indexed.
        """
        self.table(request_id)._withdraw(self._blocks, self._index, whole("first", first, 0))

    def release_before(self, request_id: Hashable, position: int) -> int:
        """Releases the blocks of positions below ``position`` alone, which no later step reads:
        the table holds null block 0 in their places. Committed ones stay cached.

        Returns:
            The smallest position that releases another block.

        Raises:
            ValueError: ``position`` is not between 0 and ``num_computed`` of the table.
        """
        return self.table(request_id)._release(position, self._blocks, self._index)

    def fork(self, parent_id: Hashable, child_id: Hashable) -> BlockTable:
        """Registers ``child_id`` with the blocks, positions and salt of ``parent_id``, uncopied.

        Both share the positions reserved so far, and must have the same tokens there. The first one
        to reserve further into a partly filled last block gets a copy of it.

        Raises:
            UnknownRequest: the parent is not in the pool.
            DuplicateRequest: the child is.
        """
        parent = self.table(parent_id)
        if child_id in self._tables:
            raise DuplicateRequest(child_id)
        child = BlockTable(child_id, self.block_size, parent._key)
        child._skip(parent._released_keys)
        self._hold(child, parent.blocks)
        child._num_keyed = parent._num_keyed
        child.length, child.num_computed = parent.length, parent.num_computed
        self._tables[child_id] = child
        return child

    def pending_copies(self) -> list[tuple[int, int]]:
        """Returns the ``(source, destination)`` block copies to perform, oldest first.

        The caller copies K and V of all layers before it writes K/V of the next step, and then
        calls :meth:`copied`. Until then they stay pending, so a copy that fails is repeated. No
        destination is the source of another pair: they may run in any order or at once.
        """
        return self._blocks.copies.pairs()

    def copied(self, pairs: Iterable[tuple[int, int]] | NDArray[np.integer[Any]]) -> None:
        """Reports that copies of :meth:`pending_copies` were performed, and releases their sources.

        Call it before any other call that changes the pool. Pairs that are not pending are ignored.

        Raises:
            TypeError, ValueError: ``pairs`` are not pairs of block ids.
        """
        self._blocks.copied([(whole("source", s, 0), whole("destination", d, 0)) for s, d in pairs])

    def free(self, request_id: Hashable) -> None:
        """Releases all blocks of a finished request, whose table becomes empty.

        Committed full blocks stay cached. The id can be added again; a second call raises.
        """
        table = self.table(request_id)
        # Last block first, so that the tail of a chain is evicted before what leads to it.
        while len(table.blocks) > table.num_released:
            self._blocks.release(table.blocks.pop())
        table._clear()
        del self._tables[request_id]

    def preempt(self, request_id: Hashable) -> None:
        """Frees a request that will come back, and counts it.

        To resume, ``add`` it with the prompt *and* the generated tokens: blocks that were not
        evicted are found in the prefix cache.
        """
        self.free(request_id)
        self._num_preemptions += 1

    def compaction(self, limit: int) -> list[tuple[int, int]]:
        """Plans moves of used blocks to lower ids; see `BlockStates.compaction`."""
        return self._blocks.states.compaction(limit)

    def has_content(self, block: int) -> bool:
        """Whether a block is used or cached, so that a move must not overwrite it."""
        return self._blocks.states.has_content(block)

    def free_mask(self) -> NDArray[np.bool_]:
        """Which blocks are free, neither used nor cached, ``[num_blocks]``; also the null block."""
        return self._blocks.states.free_mask()

    def exchange(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Renames the two blocks of every pair, after their contents were exchanged in the cache.

        A move is enough if :meth:`has_content` is False for its destination. Costs O(1) per block
        held by a table.

        Raises:
            ValueError: a block is the null block, out of range, or occurs twice.
        """
        new_ids = self._blocks.exchange(pairs)
        for table in self._tables.values():
            table._rename(new_ids)
        self.num_exchanges += 1

    def stats(self) -> PoolStats:
        """Returns the current statistics; O(number of requests)."""
        last = {t.blocks[-1]: t.fragmentation for t in self._tables.values() if t.blocks}
        return PoolStats(
            **self._blocks.counts(),
            requests=len(self._tables),
            preemptions=self._num_preemptions,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            fragmented_slots=sum(last.values()),
        )

    def __repr__(self) -> str:
        s = self._blocks.states
        return (
            f"BlockPool(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"used={s.num_used}, free={s.num_free}, cached={s.num_cached})"
        )

    def _match(self, prompt: PromptKeys) -> tuple[list[int], bytes]:
        return self._index.match(prompt, limit=max(0, len(prompt.tokens) - 1))

    def _hold(self, table: BlockTable, blocks: list[int]) -> None:
        for block in blocks[table.num_released :]:
            self._blocks.acquire(block)
        table._extend(blocks)
