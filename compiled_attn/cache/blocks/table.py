"""The blocks of one request, in the order of its positions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.allocator import BlockAllocator, PendingCopies
from compiled_attn.cache.blocks.prefix import (
    TOKEN_BYTES,
    PrefixIndex,
    Tokens,
    check_tokens,
    token_bytes,
)

__all__ = ["BlockTable"]


class BlockTable:
    """The block table of one request. Only the ``BlockPool`` changes it; read it freely.

    Position ``p`` is in block ``blocks[p // block_size]`` at offset ``p % block_size``. A prompt
    whose length is a multiple of the block size leaves its last block full: no block is held
    without a position.

    Attributes:
        request_id: the request that holds the blocks.
        block_size: slots in a block.
        blocks: physical blocks in the order of positions, ``ceil(length / block_size)`` of them;
            the null block 0 stands for the released ones only.
        num_released: leading blocks that the request no longer holds, see
            ``BlockPool.release_before``.
        length: positions reserved: the table can address positions ``< length``, written or not.
        num_computed: positions ``< num_computed`` hold computed K/V (prefix hits, then whatever
            was committed).
        num_cached_tokens: positions found in the prefix cache when the request was added.
    """

    __slots__ = (
        "_array",
        "_key",
        "_next_full",
        "_num_keyed",
        "_released_keys",
        "block_size",
        "blocks",
        "length",
        "num_cached_tokens",
        "num_computed",
        "num_released",
        "request_id",
    )

    def __init__(self, request_id: Hashable, block_size: int, key: bytes | None) -> None:
        self.request_id = request_id
        self.block_size = block_size
        self.blocks: list[int] = []
        self.length = 0
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.num_released = 0
        self._released_keys: list[bytes | None] = []
        self._array: NDArray[np.int64] = np.zeros(8, dtype=np.int64)
        # The chain key after the first ``_num_keyed`` blocks; None if a withdrawn block breaks the
        # chain, so that no later block can have a key.
        self._key = key
        self._num_keyed = 0
        self._next_full = 0  # computed positions at which the next block is full

    @property
    def array(self) -> NDArray[np.int64]:
        """``blocks`` as ``[capacity]`` int64, updated in place, padded with the null block 0.

        Read ``array[:len(blocks)]``, and copy what must outlive the next call to the pool.
        Capacity doubles when it is used up, which allocates a new array.
        """
        return self._array

    @property
    def last_position(self) -> int:
        """The last position held, ``length - 1``; ``ValueError`` for an empty table."""
        if not self.length:
            raise ValueError(
                f"expected a last position, got the empty table of request {self.request_id!r}: "
                "reserve first"
            )
        return self.length - 1

    @property
    def fragmentation(self) -> int:
        """Slots of the held blocks beyond ``length``: between 0 and ``block_size - 1``."""
        return len(self.blocks) * self.block_size - self.length

    def slot(self, position: int) -> int:
        """Returns the flat cache slot ``block * block_size + offset`` of ``position``.

        Raises ``ValueError`` unless ``0 <= position < length``, or if its block was released.
        """
        position = whole("position", position, 0)
        if position >= self.length:
            raise ValueError(
                f"expected a position < {self.length} of request {self.request_id!r}, "
                f"got {position}: reserve it first"
            )
        block, offset = divmod(position, self.block_size)
        if block < self.num_released:
            raise ValueError(
                f"expected a position >= {self.num_released * self.block_size} of request "
                f"{self.request_id!r}, got {position}: its block was released"
            )
        return self.blocks[block] * self.block_size + offset

    def block_table(self, pad_to: int | None = None) -> NDArray[np.int32]:
        """Returns a new ``[pad_to]`` int32 row of blocks, padded with the null block 0.

        Without ``pad_to`` the row is as long as the table. Raises ``ValueError`` if it is too
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

    def _blocks_needed(self, length: int, blocks: BlockAllocator) -> int:
        """Blocks to allocate to hold ``length`` positions, including one for a copy on write."""
        if length <= self.length:
            return 0
        return _count(length, self.block_size) - len(self.blocks) + self._shares_last(blocks)

    def _fits_last_block(self, length: int, blocks: BlockAllocator) -> bool:
        held = self.blocks
        return self.length < length <= len(held) * self.block_size and blocks.refs[held[-1]] == 1

    def _grow(self, needed: int, blocks: BlockAllocator) -> list[int]:
        """Adds ``needed`` blocks; returns the new ids, a replacement of the last block first."""
        added = []
        if self._shares_last(blocks):
            last = self.blocks[-1]
            added = [blocks.copy(last)]
            blocks.release(last)
            self.blocks[-1] = self._array[len(self.blocks) - 1] = added[0]
        fresh = [blocks.allocate() for _ in range(needed - len(added))]
        self._extend(fresh)
        return added + fresh

    def _shares_last(self, blocks: BlockAllocator) -> bool:
        """Whether the next position is in a block that another table holds too."""
        return self.length % self.block_size != 0 and blocks.is_shared(self.blocks[-1])

    def _release(self, before: int, blocks: BlockAllocator, index: PrefixIndex) -> int:
        if whole("position", before, 0) > self.num_computed:
            raise ValueError(
                f"expected a position <= {self.num_computed} (computed) of request "
                f"{self.request_id!r}, got {before}: commit first"
            )
        for at in range(self.num_released, before // self.block_size):
            block = self.blocks[at]
            self._released_keys.append(index.key(block))
            self.blocks[at] = self._array[at] = 0
            self.num_released = at + 1
            blocks.release(block)
        return (self.num_released + 1) * self.block_size

    def _skip(self, keys: Iterable[bytes | None]) -> None:
        """Notes that the first blocks are null, with these keys."""
        self._released_keys = [*keys]
        self.num_released = len(self._released_keys)

    def _check_commit(self, tokens: Tokens, length: int, copies: PendingCopies) -> None:
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
                    "each step, and report them with copied()"
                )

    def _publish(self, index: PrefixIndex, tokens: Tokens, length: int) -> None:
        key, start, stop = self._key, self._num_keyed, length // self.block_size
        if key is None or stop <= start:
            return
        size = self.block_size * TOKEN_BYTES
        # All tokens before the first insertion: a bad one must change nothing.
        data = token_bytes(tokens[start * self.block_size : stop * self.block_size])
        for number, block in enumerate(self.blocks[start:stop]):
            key = index.put(key, data[number * size : (number + 1) * size], block)
        self._key, self._num_keyed = key, stop

    def _withdraw(self, blocks: BlockAllocator, index: PrefixIndex, first: int) -> None:
        self._key = None
        for key in self._released_keys[first:]:
            if key is not None:
                blocks.withdraw(key)
        for block in self.blocks[max(first, self.num_released) :]:
            index.remove(block)

    def _rename(self, new_ids: Mapping[int, int]) -> None:
        if new_ids.keys().isdisjoint(self.blocks):
            return
        held = self._array[: len(self.blocks)]
        for at in np.flatnonzero(np.isin(held, list(new_ids))).tolist():
            self.blocks[at] = self._array[at] = new_ids[self.blocks[at]]

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
        self._skip([])
        self.length = self.num_computed = self.num_cached_tokens = self._next_full = 0


def _count(length: int, block_size: int) -> int:
    return -(-length // block_size)
