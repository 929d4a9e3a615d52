"""The defragmenter, which moves used blocks to the beginning of a cache that serves."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.places import BlockPlaces
from compiled_attn.cache.defrag.holders import Holders
from compiled_attn.cache.defrag.report import DefragReport, DefragTotals, Move

__all__ = ["BlockCopies", "OnlineDefragmenter"]


class BlockCopies(Protocol):
    """Copies of blocks of a cache, as `BlockSwap` makes them; see there."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, null block included."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all tensors together."""

    def move(self, pairs: NDArray[np.integer[Any]] | Sequence[tuple[int, int]]) -> None:
        """Copies blocks from sources to destinations."""

    def take(self, places: Sequence[int] | NDArray[np.integer[Any]]) -> list[Tensor]:
        """A copy of the blocks at places."""

    def put(
        self, places: Sequence[int] | NDArray[np.integer[Any]], contents: Sequence[Tensor]
    ) -> None:
        """Writes what `take` gave to as many places."""


class OnlineDefragmenter:
    """Keeps the highest place in use close to the number of used blocks.

    Ids that a scheduler holds stay as they are; :meth:`resolve_all` turns its tables into places.
    :meth:`defragment` takes the highest used blocks to the lowest places that are not in use: by a
    move where the place is free, by an exchange where it holds a block worth keeping (a cached
    prefix), which is kept outside of the cache meanwhile. The places change only after the copies
    are issued.

    Args:
        places: of a `BlockPool`, which keeps them up to date; or the number of blocks, for a
            scheduler with an allocator of its own, which calls :meth:`update`.
        swap: a `BlockSwap` of the cache, warmed up before the first :meth:`defragment`.
        max_waste: :attr:`is_due` above this share of unused places in the range, 0 to 1.
        min_gap: and not before so many places of it are unused.
        max_blocks: used blocks that one call takes down, at most.
        max_bytes: bytes of the cache that one call writes, at most; an exchange writes two blocks.

    Attributes:
        places: where each block lies.
        totals: moves, exchanges and bytes of all calls.

    Raises:
        ValueError: the sizes of places and swap differ, or a limit makes no sense.
        TypeError: a limit is not a number.

    Example::

        defragmenter = OnlineDefragmenter(pool.places, swap)
        if defragmenter.is_due:
            print(defragmenter.defragment())
        table = defragmenter.resolve_all(pool.table("a").block_table())
    """

    def __init__(
        self,
        places: BlockPlaces | int,
        swap: BlockCopies,
        *,
        max_waste: float = 0.25,
        min_gap: int = 8,
        max_blocks: int = 64,
        max_bytes: int | None = None,
    ) -> None:
        self.places = places if isinstance(places, BlockPlaces) else BlockPlaces(places)
        if self.places.num_blocks != swap.num_blocks:
            raise ValueError(
                f"expected places for the {swap.num_blocks} blocks of the cache, got "
                f"{self.places.num_blocks}: make both of one size"
            )
        if not 0 <= max_waste <= 1:
            raise ValueError(f"expected max_waste in 0..1, got {max_waste}: try 0.25")
        self.max_waste = max_waste
        self.min_gap = whole("min_gap", min_gap, 1)
        self.max_blocks = whole("max_blocks", max_blocks, 1)
        self.max_bytes = _checked_bytes(max_bytes, 2 * swap.bytes_per_block)
        self.totals = DefragTotals()
        self._swap = swap
        self._holders = None if isinstance(places, BlockPlaces) else Holders(self.places)

    def resolve(self, block: int) -> int:
        """The place of a block; ``ValueError`` for -1 and every other id that is not there."""
        return self.places.resolve(block)

    def unresolve(self, place: int) -> int:
        """The block at a place; ``ValueError`` for a place that is not there."""
        return self.places.unresolve(place)

    def resolve_all(self, blocks: ArrayLike) -> NDArray[np.signedinteger[Any]]:
        """The places of block ids of any shape, such as a block table; padding 0 stays 0.

        Raises:
            ValueError, TypeError: see `BlockPlaces.resolve_all`.
        """
        return self.places.resolve_all(blocks)

    def update(
        self,
        new_blocks: Mapping[Hashable, Sequence[int]],
        finished: Iterable[Hashable] = (),
        *,
        missing_ok: bool = False,
    ) -> None:
        """Follows a scheduler that allocates by itself; all of it, or an error and nothing.

        Args:
            new_blocks: for each request the blocks it got since the last update; a block that
                several requests hold is in use until the last of them finished.
            finished: requests that ended, were aborted or preempted: all their blocks are let go,
                before anything is added, so that an id may be in both.
            missing_ok: whether a finished request that holds nothing here is ignored; engines also
                abort requests that never got a block.

        Raises:
            UnknownRequest: a finished request is unknown, or finished before, and ``missing_ok`` is
                False.
            ValueError: a request finished twice in one call, or got a block that it holds already
                or that does not exist.
            TypeError: a block is not an integer.
            RuntimeError: the places are a pool's.
        """
        if self._holders is None:
            raise RuntimeError(
                "expected places of its own, got those of a pool, which keeps them up to date: "
                "don't call update()"
            )
        self._holders.update(new_blocks, finished, missing_ok=missing_ok)

    @property
    def waste(self) -> float:
        """Share of the places from 1 to the highest used one that are not in use."""
        highest = self.places.highest_used
        return self._gap / highest if highest else 0.0

    @property
    def is_due(self) -> bool:
        """Whether waste is above ``max_waste``, and the unused places at least ``min_gap``."""
        return self.waste > self.max_waste and self._gap >= self.min_gap

    def plan(self) -> list[Move]:
        """What :meth:`defragment` would do now, within the budget; changes nothing.

        Costs as much as it plans, whatever the size of the cache.
        """
        places = self.places
        left = math.inf if self.max_bytes is None else self.max_bytes // self._swap.bytes_per_block
        moves = []
        for source, destination in places.compaction(int(min(self.max_blocks, left))):
            move = Move(source, destination, places.is_worth_keeping(destination))
            left -= move.written_blocks
            if left < 0:
                break
            moves.append(move)
        return moves

    def defragment(self) -> DefragReport:
        """Copies what :meth:`plan` says and changes the places; due or not.

        Call it between steps, with no place of a running step in hand: tables resolved before are
        out of date after it.

        Raises:
            RuntimeError: the swap is closed, or not warmed up.
            Exception: a copy failed, or the call was interrupted, at whatever line. It happened, or
                it did not: every block worth keeping has its content where it lies.
        """
        moves, before = self.plan(), self.places.highest_used
        if not moves:
            return DefragReport(0, 0, 0, before, before)
        pairs = [move[:2] for move in moves]
        self._set_aside([move.destination for move in moves if move.is_swap])
        try:
            self._swap.move(pairs)
            self.places.swap(pairs)
        finally:
            self.places.settle()
        written = sum(move.written_blocks for move in moves) * self._swap.bytes_per_block
        swaps, after = sum(move.is_swap for move in moves), self.places.highest_used
        report = DefragReport(len(moves), swaps, written, before, after)
        self.totals = self.totals.plus(report)
        return report

    def __repr__(self) -> str:
        return (
            f"OnlineDefragmenter(num_used={self.places.num_used}, "
            f"highest_used={self.places.highest_used}, {self.totals})"
        )

    def _set_aside(self, kept: list[int]) -> None:
        """Copies what is worth keeping at places that will be overwritten out of the cache.

        From then on this copy is the content of these blocks: the next reader of a place has it
        written to where they lie, which is where they did, or, once the places have changed, where
        they belong. So nothing depends on how far the copies in the cache got.
        """
        if kept:
            blocks = [self.places.unresolve(place) for place in kept]
            contents = self._swap.take(kept)
            self.places.restore = lambda places: self._swap.put(places[blocks], contents)

    @property
    def _gap(self) -> int:
        return self.places.highest_used - self.places.num_used


def _checked_bytes(max_bytes: int | None, least: int) -> int | None:
    if max_bytes is None:
        return None
    if whole("max_bytes", max_bytes, 0) < least:
        raise ValueError(
            f"expected max_bytes of at least {least}, what exchanging one block writes, got "
            f"{max_bytes}: nothing could ever move"
        )
    return max_bytes
