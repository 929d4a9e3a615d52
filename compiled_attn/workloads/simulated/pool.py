"""A block pool without ids: how many blocks a simulated step reads, and how many are shared.

It follows `BlockPool` in what can be counted: which prefix is found, which
cached block is evicted first, when blocks run out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

__all__ = ["SimulatedPool"]


class SimulatedPool:
    """Blocks by number, counted by their holders and by the single tokens that read them.

    ``shared`` and ``unique`` are the distinct blocks that the single-token requests entered by
    `read` use together: those that several of them read, and those that one does.
    """

    def __init__(self, blocks: int) -> None:
        self.shared = self.unique = 0
        self._unused = blocks
        self._refs: list[int] = []
        self._readers: list[int] = []
        self._keys: list[Hashable] = []
        self._recycled: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[Hashable, list[int]] = {}

    @property
    def available(self) -> int:
        """Blocks that could be taken now, cached ones included."""
        return self._unused + len(self._cached)

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """The blocks of the longest known prefix of ``keys``."""
        found: list[int] = []
        for key in keys:
            same = self._index.get(key)
            if same is None:
                break
            found.append(same[0])
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of the blocks no request holds."""
        return sum(not self._refs[block] for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks that were found."""
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1

    def take(self) -> int:
        """A fresh block with one holder; the caller has seen that one is available."""
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

    def know(self, block: int, key: Hashable) -> None:
        """A block is full and can be found from now on; an equal one before it stays the found."""
        self._keys[block] = key
        self._index.setdefault(key, []).append(block)

    def drop(self, blocks: Sequence[int]) -> None:
        """Take a holder away; the last block first, so that it is evicted first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._release(block)

    def read(self, blocks: Iterable[int]) -> None:
        """One more single-token request reads these blocks in every step."""
        for block in blocks:
            self._readers[block] += 1
            if self._readers[block] == 1:
                self.unique += 1
            elif self._readers[block] == 2:
                self.unique -= 1
                self.shared += 1

    def unread(self, blocks: Iterable[int]) -> None:
        """One of them reads these blocks no more."""
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self.unique -= 1
            elif self._readers[block] == 1:
                self.shared -= 1
                self.unique += 1

    def counts(self, context: Iterable[int]) -> tuple[int, int]:
        """Shared and unique blocks of a step whose prompt chunks read ``context`` too."""
        shared, unique = self.shared, self.unique
        for block in set(context):
            readers = self._readers[block]
            shared += readers < 2
            unique -= readers == 1
        return shared, unique

    def _release(self, block: int) -> None:
        key = self._keys[block]
        same = self._index.get(key) if key is not None else None
        if same and same[0] == block:
            self._cached[block] = None
            return
        if same:
            same.remove(block)
            if same[0] in self._cached:  # its content was in use till now
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
