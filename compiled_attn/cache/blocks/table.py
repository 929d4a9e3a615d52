"""The blocks of one request, in the order of its positions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.allocator import BlockAllocator, PendingCopies
from compiled_attn.cache.blocks.partial_hits import TOKEN_BYTES
from compiled_attn.cache.blocks.prefix import PrefixIndex, Tokens, check_tokens, token_bytes

__all__ = ["BlockTable"]


class BlockTable:
    """Where the positions of one request live. Only the ``BlockPool`` changes it; read it freely.

    Position ``p`` is in block ``blocks[p // block_size]`` at offset ``p % block_size``. A prompt
    that is an exact multiple of the block size leaves its last block full: no block is held that
    has no position.

    Attributes:
        request_id: the request that holds the blocks.
        block_size: slots in a block.
        blocks: block ids in the order of positions; ``ceil(length / block_size)`` of them, never
            the null block 0.
        length: positions reserved: the table can address positions ``< length``, whether written
            yet or not.
        num_computed: positions ``< num_computed`` hold computed K/V (prefix hits, then what was
            committed).
        num_cached_tokens: positions found in the prefix cache when the request was added.
    """

    __slots__ = (
        "_array",
        "_key",
        "_num_keyed",
        "_quiet_below",
        "block_size",
        "blocks",
        "length",
        "num_cached_tokens",
        "num_computed",
        "request_id",
    )

    def __init__(self, request_id: Hashable, block_size: int, key: bytes | None) -> None:
        self.request_id = request_id
        self.block_size = block_size
        self.blocks: list[int] = []
        self.length = 0
        self.num_computed = 0
        self.num_cached_tokens = 0
        self._array: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        # The chain key after the first ``_num_keyed`` blocks, from which the next full block's key
        # follows; None where a block in between has none, so that no later one can have any.
        self._key = key
        self._num_keyed = 0
        # Up to here nothing that is computed need be told to the index, as of the last commit.
        self._quiet_below = 0

    @property
    def array(self) -> NDArray[np.int64]:
        """The ids of ``blocks``, ``[capacity]`` int64, updated in place, padded with null block 0.

        Not copied and not made anew per step: read ``array[:len(blocks)]``, and copy what must
        outlive the next call to the pool. Capacity doubles when it is used up, which makes a new
        array.
        """
        return self._array

    @property
    def last_position(self) -> int:
        """The last position held, ``length - 1``; an empty table raises ``ValueError``."""
        if not self.length:
            raise ValueError(
                f"expected a last position, got the empty table of request {self.request_id!r}: "
                "reserve first"
            )
        return self.length - 1

    @property
    def fragmentation(self) -> int:
        """Slots of the held blocks that lie beyond ``length``: between 0 and ``block_size - 1``."""
        return len(self.blocks) * self.block_size - self.length

    def slot(self, position: int) -> int:
        """Return the flat slot ``block * block_size + offset`` of ``position``.

        This is the slot of the cache as long as the block lies at its own place: where blocks are
        moved, ``BlockPlaces.resolve`` the block first. Raises ``ValueError`` unless
        ``0 <= position < length``.
        """
        position = whole("position", position, 0)
        if position >= self.length:
            raise ValueError(
                f"expected a position < {self.length} of request {self.request_id!r}, "
                f"got {position}: reserve it first"
            )
        block, offset = divmod(position, self.block_size)
        return self.blocks[block] * self.block_size + offset

    def block_table(self, pad_to: int | None = None) -> NDArray[np.int32]:
        """Return a new ``[pad_to]`` int32 row of block ids, padded with the null block 0.

        Without ``pad_to`` the row is as long as the table. Raises ``ValueError`` where it is too
        short.
        """
        count = len(self.blocks)
        width = count if pad_to is None else whole("pad_to", pad_to, 0)
        if width < count:
            raise ValueError(
                f"expected pad_to >= {count}, the blocks of request {self.request_id!r}, "
                f"got {width}: take a wider bucket"
            )
        row = np.zeros(width, dtype=np.int32)
        row[:count] = self._array[:count]
        return row

    def __repr__(self) -> str:
        return (
            f"BlockTable({self.request_id!r}, length={self.length}, "
            f"num_computed={self.num_computed}, blocks={self.blocks})"
        )

    def _needs(self, length: int, blocks: BlockAllocator) -> int:
        """The blocks that holding ``length`` positions takes, that of a copy on write included."""
        if length <= self.length:
            return 0
        return _count(length, self.block_size) - len(self.blocks) + self._shares_last(blocks)

    def _extends_in_place(self, length: int, blocks: BlockAllocator) -> bool:
        """Whether ``length`` more positions fit into the last block, which nobody else holds."""
        held = self.blocks
        return self.length < length <= len(held) * self.block_size and blocks.refs[held[-1]] == 1

    def _fits(self, needed: int, blocks: BlockAllocator) -> bool:
        """Whether ``needed`` blocks are there, the source of the last block's copy being one."""
        if needed <= blocks.available:
            return True
        can_take_over = bool(self.blocks) and blocks.can_take_over(self.blocks[-1])
        return can_take_over and needed == blocks.available + 1

    def _grow(self, needed: int, blocks: BlockAllocator) -> list[int]:
        """Adds ``needed`` blocks that fit; gives the new ids, a replacement of the last first."""
        added = []
        if self._shares_last(blocks):
            last = self.blocks[-1]
            added = [blocks.copy(last)]
            blocks.release(last)
            needed -= 1
        elif needed > blocks.available:
            added = [blocks.take_over(self.blocks[-1])]
        if added:
            self.blocks[-1] = self._array[len(self.blocks) - 1] = added[0]
        fresh = [blocks.allocate() for _ in range(needed)]
        self._extend(fresh)
        return added + fresh

    def _shares_last(self, blocks: BlockAllocator) -> bool:
        """Whether the next position is in a block that another table holds too."""
        return self.length % self.block_size != 0 and blocks.is_shared(self.blocks[-1])

    def _check_commit(self, tokens: Tokens, length: int, copies: PendingCopies) -> None:
        """Raises what `BlockPool.commit` raises."""
        if not self.num_computed <= length <= self.length:
            raise ValueError(
                f"expected a length between {self.num_computed} (computed) and {self.length} "
                f"(reserved) for request {self.request_id!r}, got {length}: "
                "reserve before, and commit only forward"
            )
        check_tokens(tokens)
        if len(tokens) < length:
            raise ValueError(
                f"expected at least {length} tokens for request {self.request_id!r}, "
                f"got {len(tokens)}: pass the prompt too"
            )
        written = slice(self.num_computed // self.block_size, _count(length, self.block_size))
        if length > self.num_computed and copies:
            waiting = [block for block in self.blocks[written] if block in copies]
            if waiting:
                raise RuntimeError(
                    f"expected the blocks of request {self.request_id!r} to be copied before they "
                    f"are written, got blocks {waiting} waiting: perform pending_copies() before "
                    "each step, and say so with copied()"
                )

    def _publish(self, index: PrefixIndex, tokens: Tokens, length: int) -> None:
        """Lets the blocks that become full with ``length`` computed positions be found, or parts
        of one. Nothing of a table that was withdrawn is.
        """
        key, start, stop = self._key, self._num_keyed, index.findable(self.num_computed, length)
        if key is None or stop <= start * self.block_size:
            return
        size = self.block_size * TOKEN_BYTES
        # All tokens before the first insertion: a bad one must change nothing.
        data = token_bytes(tokens[start * self.block_size : stop])
        for number, block in enumerate(self.blocks[start : _count(stop, self.block_size)]):
            key = index.put(key, data[number * size : (number + 1) * size], block)
        self._key, self._num_keyed = key, stop // self.block_size

    def _withdraw(self, index: PrefixIndex, first: int) -> None:
        """Lets none of the blocks from the ``first`` on be found.

        Without a key no later block of the table, and of none forked from it, has one.
        """
        self._key = None
        for block in self.blocks[first:]:
            index.withdraw(block)

    def _extend(self, blocks: Iterable[int]) -> None:
        start = len(self.blocks)
        self.blocks.extend(blocks)
        count = len(self.blocks)
        if count > len(self._array):
            grown = np.zeros(max(count, 2 * len(self._array)), dtype=np.int64)
            grown[:start] = self._array[:start]
            self._array = grown
        self._array[start:count] = self.blocks[start:]

    def _clear(self) -> None:
        self._array.fill(0)
        self.blocks.clear()
        self.length = self.num_computed = self.num_cached_tokens = self._quiet_below = 0


def _count(length: int, block_size: int) -> int:
    return -(-length // block_size)
