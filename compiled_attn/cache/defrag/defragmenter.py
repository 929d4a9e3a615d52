"""The defragmenter, which moves used blocks to the beginning of the cache while it serves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.pool import BlockPool
from compiled_attn.cache.defrag.logical import LogicalBlocks
from compiled_attn.cache.defrag.swap import BlockSwap

__all__ = ["DefragReport", "DefragTotals", "Move", "OnlineDefragmenter"]


class Move(NamedTuple):
    """A used block on its way from a high id to a low one.

    Attributes:
        is_swap: whether the destination has content worth keeping, so that the two blocks are
            exchanged; otherwise it is overwritten.
    """

    source: int
    destination: int
    is_swap: bool

    @property
    def written_blocks(self) -> int:
        """Number of blocks written in the cache."""
        return 2 if self.is_swap else 1


@dataclass(frozen=True, slots=True)
class DefragReport:
    """Result of one call of ``OnlineDefragmenter.defragment``.

    Attributes:
        swaps: those of them that were exchanged with a block worth keeping.
        bytes: bytes written in the cache, in all layers (as many were read).
    """

    moves: int
    swaps: int
    bytes: int
    range_before: int
    range_after: int


@dataclass(frozen=True, slots=True)
class DefragTotals:
    """Calls that moved something, and their moves, swaps and bytes together."""

    calls: int = 0
    moves: int = 0
    swaps: int = 0
    bytes: int = 0

    def plus(self, report: DefragReport) -> DefragTotals:
        """Returns the totals including another call."""
        return DefragTotals(
            self.calls + 1,
            self.moves + report.moves,
            self.swaps + report.swaps,
            self.bytes + report.bytes,
        )


class OnlineDefragmenter:
    """Holds the highest used block close to the number of used blocks.

    :meth:`defragment` moves the highest used blocks to the lowest blocks that are not used, or
    exchanges them if the lower one is worth keeping (a cached prefix). Tables change only after the
    copies are issued.

    Args:
        blocks: a `BlockPool`, or `LogicalBlocks` for a scheduler with its own allocator.
        swap: a `BlockSwap` of the cache, warmed up before the first :meth:`defragment`.
        max_waste: :attr:`is_due` above this share of unused blocks in the used range, 0 to 1.
        min_gap: minimum number of unused blocks in that range.
        max_blocks: maximum number of used blocks that one call moves.
        max_bytes: maximum number of bytes that one call writes; an exchange writes two blocks.

    Attributes:
        blocks: as given.
        totals: moves, exchanges and bytes of all calls.

    Raises:
        ValueError: ``blocks`` and ``swap`` have different sizes, or a limit is out of range.
        TypeError: a limit is not a number.

    Example::

        defragmenter = OnlineDefragmenter(pool, swap)
        if defragmenter.is_due:
            print(defragmenter.defragment())
    """

    def __init__(
        self,
        blocks: BlockPool | LogicalBlocks,
        swap: BlockSwap,
        *,
        max_waste: float = 0.25,
        min_gap: int = 8,
        max_blocks: int = 64,
        max_bytes: int | None = None,
    ) -> None:
        if blocks.num_blocks != swap.num_blocks:
            raise ValueError(
                f"expected the {swap.num_blocks} blocks of the cache, got {blocks.num_blocks}: "
                "make both of one size"
            )
        if not 0 <= max_waste <= 1:
            raise ValueError(f"expected max_waste in 0..1, got {max_waste}: try 0.25")
        self.blocks = blocks
        self.max_waste = max_waste
        self.min_gap = whole("min_gap", min_gap, 1)
        self.max_blocks = whole("max_blocks", max_blocks, 1)
        self.max_bytes = _checked_bytes(max_bytes, 2 * swap.bytes_per_block)
        self.totals = DefragTotals()
        self._swap = swap

    @property
    def waste(self) -> float:
        """Share of the blocks from 1 to the highest used one that are not used."""
        highest = self.blocks.highest_used
        return self._gap / highest if highest else 0.0

    @property
    def is_due(self) -> bool:
        """Whether waste is above ``max_waste`` and at least ``min_gap`` blocks are unused."""
        return self.waste > self.max_waste and self._gap >= self.min_gap

    def plan(self) -> list[Move]:
        """Returns the moves of :meth:`defragment` within the budget; changes nothing.

        The cost depends on the moves planned and not on the size of the cache.
        """
        blocks = self.blocks
        left = math.inf if self.max_bytes is None else self.max_bytes // self._swap.bytes_per_block
        moves = []
        for source, destination in blocks.compaction(int(min(self.max_blocks, left))):
            move = Move(source, destination, blocks.has_content(destination))
            left -= move.written_blocks
            if left < 0:
                break
            moves.append(move)
        return moves

    def defragment(self) -> DefragReport:
        """Performs the moves of :meth:`plan`, whether or not it is due.

        Call it between steps: tables built before are out of date after it.

        Raises:
            RuntimeError: the swap is closed, or not warmed up.
            Exception: a copy failed; tables and contents are as before.
        """
        moves, before = self.plan(), self.blocks.highest_used
        if not moves:
            return DefragReport(0, 0, 0, before, before)
        pairs = [move[:2] for move in moves]
        exchanged = [move[:2] for move in moves if move.is_swap]
        destinations = [destination for _, destination in exchanged]
        contents = self._swap.take(destinations) if exchanged else []
        is_moved = False
        try:
            self._swap.move(pairs)
            is_moved = True
            if exchanged:
                self._swap.put([source for source, _ in exchanged], contents)
            self.blocks.exchange(pairs)
        except BaseException:
            if exchanged and is_moved:
                self._swap.move([(destination, source) for source, destination in exchanged])
            if exchanged:
                self._swap.put(destinations, contents)
            raise
        written = sum(move.written_blocks for move in moves) * self._swap.bytes_per_block
        swaps, after = sum(move.is_swap for move in moves), self.blocks.highest_used
        report = DefragReport(len(moves), swaps, written, before, after)
        self.totals = self.totals.plus(report)
        return report

    def __repr__(self) -> str:
        return (
            f"OnlineDefragmenter(num_used={self.blocks.num_used}, "
            f"highest_used={self.blocks.highest_used}, {self.totals})"
        )

    @property
    def _gap(self) -> int:
        return self.blocks.highest_used - self.blocks.num_used


def _checked_bytes(max_bytes: int | None, least: int) -> int | None:
    if max_bytes is None:
        return None
    if whole("max_bytes", max_bytes, 0) < least:
        raise ValueError(
            f"expected max_bytes of at least {least}, the bytes that exchanging one block writes, "
            f"got {max_bytes}: nothing could ever move"
        )
    return max_bytes
