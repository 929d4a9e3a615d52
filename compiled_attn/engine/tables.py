"""The block tables of the running requests, brought up to date before each step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from compiled_attn.cache.blocks import BlockPool, BlockTable
from compiled_attn.step import RequestTable

__all__ = ["StepTables"]


class StepTables:
    """Keeps a `RequestTable` of places for the requests of a pool.

    From one step to the next a request gains a block now and then, or its last one is replaced by a
    copy; only that is written. A torn table is given up with its pool.

    Args:
        pool: of the blocks.
        max_requests: rows; more than run at once, so that rows of those that have gone are seldom
            looked for.
        max_blocks: blocks of the longest request.
    """

    def __init__(self, pool: BlockPool, max_requests: int, max_blocks: int) -> None:
        self._pool = pool
        self._sizes = max_requests, max_blocks
        self.forget_places()

    def forget_places(self) -> None:
        """Notes that blocks were moved."""
        self._rows = RequestTable(*self._sizes)
        self._seen: dict[Hashable, tuple[BlockTable, int, int]] = {}

    def of(self, request_ids: Iterable[Hashable]) -> RequestTable:
        """The table, in which the rows of these requests are as the pool has them.

        Raises:
            UnknownRequest: a request is not in the pool.
        """
        for request_id in request_ids:
            table = self._pool.table(request_id)
            count, last = len(table.blocks), table.blocks[-1] if table.blocks else 0
            before, known, known_last = self._seen.get(request_id, (None, 0, 0))
            if before is not table:
                self._begin(request_id)
                known = 0
            elif known and table.blocks[known - 1] != known_last:
                known -= 1
            if known < count:
                places = self._pool.places.resolve_all(table.array[known:count])
                self._rows.write(request_id, known, places)
            self._seen[request_id] = table, count, last
        return self._rows

    def _begin(self, request_id: Hashable) -> None:
        """An empty row for a request."""
        if request_id in self._rows:
            self._rows.remove(request_id)
        elif not self._rows.num_free:
            for gone in [each for each in self._seen if each not in self._pool]:
                self._rows.remove(gone)
                del self._seen[gone]
        self._rows.add(request_id)
