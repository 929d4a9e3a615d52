"""A mock of `BlockPool` without contents, which counts the shared and unique blocks of a step.

It finds the same prefixes, evicts cached blocks in the same order and runs out at the same time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from compiled_attn.planner.simulator.engine import CountedTokens

__all__ = ["CountedTable", "SimulatedPool"]


class CountedTable:
    """Blocks of a request: the first ``keyed`` are in the index, the first ``read`` counted."""

    __slots__ = ("blocks", "keyed", "num_cached_tokens", "read")

    def __init__(self, blocks: list[int], block_size: int) -> None:
        self.blocks, self.keyed, self.read = blocks, len(blocks), 0
        self.num_cached_tokens = len(blocks) * block_size


class SimulatedPool:
    """Blocks by number, with their owners and the number of single tokens that read them.

    ``shared`` and ``unique`` count the distinct blocks that several, or one, of the requests passed
    to `read` use.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.shared = self.unique = 0
        self.tables: dict[int, CountedTable] = {}
        self._unused = blocks
        self._refs: list[int] = []
        self._readers: list[int] = []
        self._keys: list[Hashable] = []
        self._recycled: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[Hashable, list[int]] = {}

    def prompt(self, tokens: CountedTokens, *, salt: None = None) -> CountedTokens:
        """See `BlockPool.prompt`; hashes nothing."""
        return tokens

    def can_allocate(self, length: int, tokens: CountedTokens, *, salt: None = None) -> bool:
        """See `BlockPool.can_allocate`."""
        hits = self._find(tokens)
        idle = sum(not self._refs[block] for block in hits)
        return -(-length // self.block_size) - len(hits) <= self._available() - idle

    def add(self, request_id: int, tokens: CountedTokens, *, salt: None = None) -> CountedTable:
        """See `BlockPool.add`."""
        hits = self._find(tokens)
        for block in hits:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1
        table = self.tables[request_id] = CountedTable(hits, self.block_size)
        return table

    def try_reserve(self, request_id: int, length: int) -> bool:
        """See `BlockPool.try_reserve`."""
        missing = -(-length // self.block_size) - len(self.tables[request_id].blocks)
        if missing > 0 and missing > self._available():
            return False
        self.reserve(request_id, length)
        return True

    def reserve(self, request_id: int, length: int) -> None:
        """See `BlockPool.reserve`."""
        blocks = self.tables[request_id].blocks
        for _ in range(-(-length // self.block_size) - len(blocks)):
            blocks.append(self._take())

    def commit(self, request_id: int, tokens: CountedTokens, length: int) -> int:
        """See `BlockPool.commit`."""
        table = self.tables[request_id]
        for number in range(table.keyed, length // self.block_size):
            key, block = tokens.key(number), table.blocks[number]
            self._keys[block] = key
            self._index.setdefault(key, []).append(block)
            table.keyed += 1
        return (table.keyed + 1) * self.block_size

    def free(self, request_id: int) -> None:
        """See `BlockPool.free`."""
        self.unread(request_id)
        for block in reversed(self.tables.pop(request_id).blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._release(block)

    preempt = free

    def read(self, request_id: int) -> None:
        """Count the blocks of a request as read by a single token, from this step on."""
        table = self.tables[request_id]
        for block in table.blocks[table.read :]:
            self._readers[block] += 1
            if self._readers[block] == 1:
                self.unique += 1
            elif self._readers[block] == 2:
                self.unique -= 1
                self.shared += 1
        table.read = len(table.blocks)

    def unread(self, request_id: int) -> None:
        """Stop counting the blocks of a request as read."""
        table = self.tables[request_id]
        for block in table.blocks[: table.read]:
            self._readers[block] -= 1
            if not self._readers[block]:
                self.unique -= 1
            elif self._readers[block] == 1:
                self.shared -= 1
                self.unique += 1
        table.read = 0

    def counts(self, context: Iterable[int]) -> tuple[int, int]:
        """Return shared and unique blocks of a step whose prompt chunks also read ``context``."""
        shared, unique = self.shared, self.unique
        for block in set(context):
            readers = self._readers[block]
            shared += readers < 2
            unique -= readers == 1
        return shared, unique

    def _available(self) -> int:
        return self._unused + len(self._cached)

    def _find(self, tokens: CountedTokens) -> list[int]:
        """The blocks of the longest cached prefix; the last token is always computed."""
        found: list[int] = []
        for number in range((len(tokens) - 1) // self.block_size):
            same = self._index.get(tokens.key(number))
            if same is None:
                break
            found.append(same[0])
        return found

    def _take(self) -> int:
        if self._unused:
            self._unused -= 1
        else:
            evicted, _ = self._cached.popitem(last=False)
            self._forget(evicted)
            self._recycled.append(evicted)
        if self._recycled:
            block = self._recycled.pop()
            self._refs[block] = 1
            return block
        self._refs.append(1)
        self._readers.append(0)
        self._keys.append(None)
        return len(self._refs) - 1

    def _release(self, block: int) -> None:
        key = self._keys[block]
        same = self._index.get(key) if key is not None else None
        if same and same[0] == block:
            self._cached[block] = None
            return
        if same:
            same.remove(block)
            if same[0] in self._cached:  # its content was in use until now
                self._cached.move_to_end(same[0])
        self._keys[block] = None
        self._recycled.append(block)
        self._unused += 1

    def _forget(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        same = self._index[key]
        same.remove(block)
        if not same:
            del self._index[key]
