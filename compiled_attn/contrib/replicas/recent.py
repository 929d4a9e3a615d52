"""Blocks that were used last: what a bounded cache holds, as its router guesses it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["RecentBlocks"]


class RecentBlocks:
    """Keys of blocks, the least recently used forgotten first.

    A key stands for a block and all before it, so a known key means a known prefix.

    Args:
        most: keys that are held.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def shared(self, keys: Sequence[int]) -> int:
        """How many leading keys are held."""
        return next((at for at, key in enumerate(keys) if key not in self._keys), len(keys))

    def use(self, keys: Sequence[int]) -> None:
        """Holds these, the end of a prompt as less recent than its beginning.

        Of a prompt of more than fits, the beginning is held.
        """
        for key in reversed(keys[: self._most]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)
