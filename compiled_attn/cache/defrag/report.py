"""The plan of a defragmentation, the report of one call, and the totals of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["DefragReport", "DefragTotals", "Move"]


class Move(NamedTuple):
    """A used block on its way from a high place to a low one.

    Attributes:
        source, destination: places of the cache.
        is_swap: whether the destination holds something worth keeping, so that the two places are
            exchanged; otherwise it is overwritten.
    """

    source: int
    destination: int
    is_swap: bool

    @property
    def written_blocks(self) -> int:
        """Blocks of the cache that are written."""
        return 2 if self.is_swap else 1


@dataclass(frozen=True, slots=True)
class DefragReport:
    """One call of ``OnlineDefragmenter.defragment``.

    Attributes:
        moves: used blocks that have a lower place now.
        swaps: those of them that were exchanged with a block worth keeping.
        bytes: bytes of the cache that were written, in all layers (and as many were read).
        range_before, range_after: highest place in use.
    """

    moves: int
    swaps: int
    bytes: int
    range_before: int
    range_after: int


@dataclass(frozen=True, slots=True)
class DefragTotals:
    """All calls so far: how many moved something, and their moves, swaps and bytes together."""

    calls: int = 0
    moves: int = 0
    swaps: int = 0
    bytes: int = 0

    def plus(self, report: DefragReport) -> DefragTotals:
        """The totals after a call that moved something."""
        return DefragTotals(
            self.calls + 1,
            self.moves + report.moves,
            self.swaps + report.swaps,
            self.bytes + report.bytes,
        )
