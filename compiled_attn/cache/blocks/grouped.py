"""A pool for models of which only some layers have a sliding window: those have fewer blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.pool import BlockPool
from compiled_attn.cache.blocks.prefix import PromptKeys, Salt, Tokens
from compiled_attn.cache.blocks.table import BlockTable
from compiled_attn.cache.blocks.window import blocks_before

__all__ = ["GroupedPool", "NearBlocks"]


class NearBlocks:
    """Lends the *near* blocks, those of the windowed layers, to the blocks of a pool.

    A near block is free, needed by requests with a block whose tokens they still see, or idle: no
    request needs it, but it stays lent, so that a prefix is found, until another block needs it.
    The near block that was needed longest ago is taken first. All operations are O(1).

    Args:
        num_near: near blocks, null block 0 included.
        near_of: ``[num_blocks]`` int32, the near block of each block, 0: none; set to 0 here and
            updated in place.

    Attributes:
        peak_needed: the most that were needed at a time.
    """

    def __init__(self, num_near: int, near_of: NDArray[np.int32]) -> None:
        self.num_near = whole("num_near (one of them is the null block)", num_near, 2)
        self.near_of = near_of
        self.near_of[:] = 0
        self.peak_needed = 0
        self._block_of = [0] * num_near
        self._needs = [0] * num_near
        self._free = [*range(num_near - 1, 0, -1)]
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of near blocks that can be lent now: the free and the idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_needed(self) -> int:
        """Number of near blocks that a request needs."""
        return self.num_near - 1 - self.available

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Returns how many of these blocks have an idle near block."""
        return sum(int(self.near_of[block]) in self._idle for block in blocks)

    def need(self, blocks: Iterable[int]) -> None:
        """Counts one more request that needs these blocks; lends near blocks to those without."""
        for block in blocks:
            near = int(self.near_of[block]) or self._lend(block)
            self._idle.pop(near, None)
            self._needs[near] += 1
        self.peak_needed = max(self.peak_needed, self.num_needed)

    def release(self, block: int, *, is_found: bool = True) -> None:
        """Counts one request less that needs a block.

        ``is_found``: whether prompts may find its content; otherwise it is taken first.
        """
        near = int(self.near_of[block])
        self._needs[near] -= 1
        if not self._needs[near]:
            self._idle[near] = None
            self._idle.move_to_end(near, last=is_found)

    def exchange(self, a: int, b: int) -> None:
        """Renames two blocks; near blocks do not move."""
        near_of = self.near_of
        near_of[a], near_of[b] = near_of[b], near_of[a]
        for block in (a, b):
            self._block_of[near_of[block]] = block

    def _lend(self, block: int) -> int:
        if self._free:
            near: int = self._free.pop()
        else:
            near = next(iter(self._idle))
            del self._idle[near]
            self.near_of[self._block_of[near]] = 0
        self.near_of[block], self._block_of[near] = near, block
        return near


class GroupedPool(BlockPool):
    """A `BlockPool` whose windowed layers have blocks of their own, the near ones.

    A request holds all of its blocks, as in any pool, and needs near blocks for those that a token
    of the next step sees in the window. A block is written in all layers at once, so its content
    is also that of its near block, as long as that is lent to it. A prefix is found if the blocks
    of its last window have near blocks. Forks are refused.

    Args:
        num_blocks, block_size, key: see `BlockPool`.
        near_window: tokens that a token sees in the windowed layers, itself included.
        num_near, near_of: see `NearBlocks`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        near_window: int,
        num_near: int,
        near_of: NDArray[np.int32],
        key: bytes | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, key=key)
        self.near = NearBlocks(num_near, near_of)
        self.near_window = whole("near_window", near_window, 1)
        self._first: dict[Hashable, int] = {}  # the first block that a request needs near

    @property
    def released_window(self) -> int | None:
        """See `BlockPool.released_window`."""
        return self.near_window

    @property
    def available(self) -> int:
        """Number of blocks that can be reserved now, each with a near one."""
        return min(super().available, self.near.available)

    def add(
        self, request_id: Hashable, tokens: Tokens | PromptKeys | None = None, *, salt: Salt = None
    ) -> BlockTable:
        """See `BlockPool.add`."""
        table = super().add(request_id, tokens, salt=salt)
        self._first[request_id] = first = self._before(table.length)
        self.near.need(table.blocks[first:])
        return table

    def can_allocate(
        self,
        length: int,
        tokens: Tokens | PromptKeys | None = None,
        *,
        salt: Salt = None,
        at_once: int | None = None,
    ) -> bool:
        """See `BlockPool.can_allocate`; ``at_once``: of the near blocks."""
        if not super().can_allocate(length, tokens, salt=salt):
            return False
        hits = [] if tokens is None else self._match(self._index.prompt(tokens, salt))[0]
        found = hits[self._before(len(hits) * self.block_size) :]
        needed = -(-length // self.block_size) - len(hits)
        if at_once is not None:
            needed = min(needed, at_once - len(found))
        return needed <= self.near.available - self.near.num_idle(found)

    def reserve(self, request_id: Hashable, length: int) -> list[int]:
        """See `BlockPool.reserve`."""
        added = super().reserve(request_id, length)
        self.near.need(added)
        return added

    def release_before(self, request_id: Hashable, position: int) -> int:
        """Releases near blocks only, see `BlockPool.release_before`."""
        table, size = self.table(request_id), self.block_size
        if whole("position", position, 0) > table.num_computed:
            raise ValueError(
                f"expected a position <= {table.num_computed} (computed) of request "
                f"{request_id!r}, got {position}: commit first"
            )
        first = self._first[request_id]
        for block in table.blocks[first : position // size]:
            self.near.release(block)
            first += 1
        self._first[request_id] = first
        return (first + 1) * size

    def free(self, request_id: Hashable) -> None:
        """See `BlockPool.free`."""
        blocks = self.table(request_id).blocks[self._first[request_id] :]
        super().free(request_id)
        del self._first[request_id]
        for block in blocks:
            self.near.release(block, is_found=self.has_content(block))

    def fork(self, parent_id: Hashable, child_id: Hashable) -> NoReturn:
        """Raises RuntimeError: the copy of a block would need one of its near block too."""
        raise RuntimeError(
            f"expected requests that are not forked, got a fork of {parent_id!r}: use a BlockPool"
        )

    def exchange(self, pairs: Iterable[tuple[int, int]]) -> None:
        """See `BlockPool.exchange`; the contents of near blocks stay where they are."""
        pairs = [*pairs]
        super().exchange(pairs)
        for a, b in pairs:
            self.near.exchange(a, b)

    def _before(self, position: int) -> int:
        return blocks_before(position, self.near_window, self.block_size)

    def _match(self, prompt: PromptKeys) -> tuple[list[int], bytes]:
        blocks, key = super()._match(prompt)
        counts = np.arange(1, len(blocks) + 1)
        lent = self.near.near_of[blocks] > 0 if blocks else counts > 0
        in_row = counts - np.maximum.accumulate(np.where(lent, 0, counts))
        before = np.maximum(0, counts * self.block_size - self.near_window + 1) // self.block_size
        end = int(counts[in_row >= counts - before].max(initial=0))
        return blocks[:end], key if end == len(blocks) else prompt.after(end)
