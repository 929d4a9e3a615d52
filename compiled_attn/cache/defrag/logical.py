"""Logical block ids for a scheduler with its own allocator, whose ids must not change."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.states import BlockStates
from compiled_attn.errors import UnknownRequest

__all__ = ["LogicalBlocks"]


class LogicalBlocks:
    """Maps the block ids of another scheduler to the physical blocks with their K/V.

    Logical block ``b`` starts in physical block ``b``; moves change the mapping. The null block 0
    is always physical block 0.

    Args:
        num_blocks: blocks of the cache including the null block, at least 2.

    Example::

        blocks = LogicalBlocks(num_blocks=100)
        defragmenter = OnlineDefragmenter(blocks, swap)
        blocks.update({"a": [40, 41]})
        defragmenter.defragment()
        blocks.resolve_all([40, 41])  # [2, 1]
    """

    def __init__(self, num_blocks: int) -> None:
        self._states = BlockStates(num_blocks)
        self.num_blocks = self._states.num_blocks
        self._physical = array("i", np.arange(self.num_blocks, dtype=np.int32).tobytes())
        self._logical = self._physical[:]
        self._view: NDArray[np.int32] = np.frombuffer(self._physical, dtype=np.int32)
        self._held: dict[Hashable, list[int]] = {}
        self._counts: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        """Number of used blocks."""
        return self._states.num_used

    @property
    def highest_used(self) -> int:
        """The highest used physical block, 0 if none is used."""
        return self._states.highest_used

    def resolve(self, block: int) -> int:
        """Returns the physical block of a logical one.

        Raises ``ValueError`` unless ``0 <= block < num_blocks``: -1 never means the last entry.
        """
        return self._physical[self._states.valid(block)]

    def unresolve(self, block: int) -> int:
        """Returns the logical block of a physical one; ``ValueError`` if it is out of range."""
        return self._logical[self._states.valid(block)]

    def resolve_all(self, blocks: ArrayLike) -> NDArray[np.signedinteger[Any]]:
        """Returns the physical blocks of logical ones; padding 0 stays 0.

        Args:
            blocks: integers of any shape (a block table) in ``range(num_blocks)``.

        Returns:
            A new array of the same shape, int32 if ``blocks`` is int32, else int64.

        Raises:
            TypeError: the ids are not integers.
            ValueError: an id is negative or too large.
        """
        ids = np.asarray(blocks)
        if not ids.size:
            ids = ids.astype(np.int64 if ids.dtype.kind == "f" else ids.dtype)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"expected integer blocks, got {ids.dtype}: pass block ids")
        for extreme in (ids.min(initial=0), ids.max(initial=0)):
            self._states.valid(int(extreme))
        physical: NDArray[np.int32] = self._view[ids]
        return physical if ids.dtype == np.int32 else physical.astype(np.int64)

    def update(
        self,
        new_blocks: Mapping[Hashable, Sequence[int]],
        finished: Iterable[Hashable] = (),
        *,
        missing_ok: bool = False,
    ) -> None:
        """Follows one step of the scheduler; raises before anything changes.

        Args:
            new_blocks: logical blocks that each request got since the last update; a block that
                several requests hold is used until the last of them finishes.
            finished: requests that finished, were aborted or preempted. Their blocks are released
                before new ones are added, so an id may be in both.
            missing_ok: ignore finished requests that hold nothing here, such as requests aborted
                before they got a block.

        Raises:
            UnknownRequest: a finished request holds nothing here, and ``missing_ok`` is False.
            ValueError: a request finished twice in one call, or got a block that it holds already
                or that does not exist.
            TypeError: a block is not an integer.
        """
        done = [each for each in finished if not missing_ok or each in self._held]
        for place, request in enumerate(done):
            if request not in self._held:
                raise UnknownRequest(request)
            if request in done[:place]:
                raise ValueError(
                    f"expected every finished request once, got {request!r} twice: name it once"
                )
        added = {name: self._checked(name, blocks, done) for name, blocks in new_blocks.items()}
        for request in done:
            for block in self._held.pop(request):
                self._release(block)
        for request, blocks in added.items():
            self._held.setdefault(request, []).extend(blocks)
            for block in blocks:
                self._acquire(block)

    def compaction(self, limit: int) -> list[tuple[int, int]]:
        """Plans moves to lower physical blocks; see `BlockStates.compaction`."""
        return self._states.compaction(limit)

    def has_content(self, block: int) -> bool:
        """Whether a physical block is used, so that a move must not overwrite it."""
        return self._states.has_content(block)

    def exchange(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Exchanges the mapping of two physical blocks each, after their contents moved.

        Raises:
            ValueError: a block is the null block, out of range, or occurs twice.
        """
        for a, b in self._states.exchange(pairs):
            x, y = self._logical[a], self._logical[b]
            self._logical[a], self._logical[b] = y, x
            self._physical[x], self._physical[y] = b, a

    def _acquire(self, block: int) -> None:
        count = self._counts.get(block, 0)
        self._counts[block] = count + 1
        if not count:
            self._states.use(self._physical[block])

    def _release(self, block: int) -> None:
        self._counts[block] -= 1
        if not self._counts[block]:
            del self._counts[block]
            self._states.release(self._physical[block])

    def _checked(
        self, request: Hashable, blocks: Sequence[int], finished: list[Hashable]
    ) -> list[int]:
        held = set() if request in finished else set(self._held.get(request, ()))
        checked: list[int] = []
        for given in blocks:
            block = whole(f"block of request {request!r}", given, 1)
            if block >= self.num_blocks:
                raise ValueError(
                    f"expected blocks < {self.num_blocks}, got block {block} for request "
                    f"{request!r}: it is not in this cache"
                )
            if block in held or block in checked:
                raise ValueError(
                    f"expected new blocks, got block {block}, which request {request!r} holds "
                    "already: report a block once"
                )
            checked.append(block)
        return checked
