"""A block pool that also counts the shared and unique blocks which a step reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from compiled_attn.cache.blocks import BlockPool

__all__ = ["CountingPool"]


class CountingPool(BlockPool):
    """Counts, for each block, the requests that `read` it with a single token.

    ``shared`` and ``unique`` are the distinct blocks that several, or one, of these requests read.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        super().__init__(num_blocks, block_size, window=window)
        self.shared = self.unique = 0
        self._readers = [0] * num_blocks
        self._read: defaultdict[Hashable, int] = defaultdict(int)  # blocks of each request

    def free(self, request_id: Hashable) -> None:
        """See `BlockPool.free`."""
        self.unread(request_id)
        super().free(request_id)

    def release_before(self, request_id: Hashable, position: int) -> int:
        """See `BlockPool.release_before`."""
        released = min(position // self.block_size, self._read.get(request_id, 0))
        self._unread(self.table(request_id).blocks[:released])
        return super().release_before(request_id, position)

    def read(self, request_id: int) -> None:
        """Count the blocks of a request as read by a single token, from this step on."""
        table = self.table(request_id)
        blocks = table.blocks
        for block in blocks[max(self._read[request_id], table.num_released) :]:
            self._readers[block] += 1
            if self._readers[block] == 1:
                self.unique += 1
            elif self._readers[block] == 2:
                self.unique -= 1
                self.shared += 1
        self._read[request_id] = len(blocks)

    def unread(self, request_id: Hashable) -> None:
        """Stop counting the blocks of a request as read."""
        self._unread(self.table(request_id).blocks[: self._read.pop(request_id, 0)])

    def _unread(self, blocks: Iterable[int]) -> None:
        for block in filter(None, blocks):  # released ones were counted when they were
            self._readers[block] -= 1
            if not self._readers[block]:
                self.unique -= 1
            elif self._readers[block] == 1:
                self.shared -= 1
                self.unique += 1

    def counts(self, context: Iterable[int]) -> tuple[int, int]:
        """Return shared and unique blocks of a step whose prompt chunks also read ``context``."""
        shared, unique = self.shared, self.unique
        for block in set(context):
            readers = self._readers[block]
            shared += readers < 2
            unique -= readers == 1
        return shared, unique
