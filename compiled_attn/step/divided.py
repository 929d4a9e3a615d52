"""Steps in tables whose blocks lie on several ranks: what one of them reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_attn.attention.metadata import KeyRanks, UnifiedMetadata
from compiled_attn.step.requests import Ints, StepRows, block_tables, padded
from compiled_attn.step.tables import StateTableBatch, TableBatch, TableLayout, TablePlan

__all__ = ["BlockShare", "DividedTableLayout"]

_Blocks: TypeAlias = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class BlockShare:
    """The blocks of one rank, which are dealt out round-robin.

    Of ``n`` ranks the first has blocks 1, n + 1, 2n + 1, .., so that the blocks of a request are
    spread evenly. Every rank has a null block.

    Args:
        process_rank: the rank's number; no graph depends on it.
        count: number of ranks.
    """

    process_rank: int
    count: int

    def of_all(self, num_blocks: int) -> int:
        """Counts the blocks of all ranks if each has ``num_blocks``, null block included."""
        return 1 + self.count * (num_blocks - 1)

    def has(self, blocks: _Blocks) -> NDArray[np.bool_]:
        """Whether each block is on this rank; the null block is not."""
        is_own: NDArray[np.bool_] = (blocks - 1) % self.count == self.process_rank
        return is_own & (blocks > 0)

    def local(self, blocks: _Blocks) -> _Blocks:
        """Returns the ids of blocks in the cache of this rank; 0 for those of others."""
        local: _Blocks = np.where(self.has(blocks), (blocks - 1) // self.count + 1, 0)
        return local


class DividedPlan(TablePlan):
    """A step of which a rank reads the earlier tokens that it stores.

    Lengths and tables of its batches are of the tokens before the step.
    """

    def __init__(
        self, rows: StepRows, used: Ints, share: BlockShare, block_size: int, width: int | None
    ) -> None:
        super().__init__(rows, used, width)
        self._share, self._block_size = share, block_size

    def _fill(self, bucket: Mapping[str, int] | None, width: int | None) -> TableBatch:
        batch = super()._fill(bucket, width)
        tokens, (requests, columns) = len(batch.slot_mapping), batch.block_tables.shape
        tables, lengths = self._earlier(requests, columns)
        return batch._replace(
            slot_mapping=padded(self._slots(), tokens),
            block_tables=torch.from_numpy(tables),
            seq_lens=padded(lengths, requests).int(),
        )

    def _slots(self) -> Ints:
        """Slots of the new tokens in the rank's cache; 0 for those of other ranks."""
        blocks, within = np.divmod(self.rows.slots, self._block_size)
        local = self._share.local(blocks)
        return np.where(local > 0, local * self._block_size + within, 0)

    def _earlier(self, requests: int, width: int) -> tuple[NDArray[np.int32], Ints]:
        """Tables ``[requests, width]`` of the rank's blocks, and tokens ``[R]`` in them."""
        size, context = self._block_size, self.rows.context
        used = -(-context // size)
        tables, lengths = np.zeros((requests, width), np.int32), np.zeros(len(used), np.int64)
        if not used.any():
            return tables, lengths
        blocks = block_tables(self.rows, used, len(used), int(used.max()))
        is_own = self._share.has(blocks)
        request, column = is_own.nonzero()
        tables[request, is_own.cumsum(1)[request, column] - 1] = self._share.local(
            blocks[request, column]
        )
        ends = np.minimum((column + 1) * size, context[request])
        np.add.at(lengths, request, ends - column * size)
        return tables, lengths


@dataclass(frozen=True, slots=True)
class DividedTableLayout(TableLayout):
    """The layout of steps for the op if each rank has some blocks of a request.

    Args:
        num_blocks: blocks of all ranks, null block included, see `BlockShare.of_all`.
        share: blocks of this rank.
        group: name of the process group.
    """

    share: BlockShare = BlockShare(0, 1)
    group: str = ""

    def plan(self, rows: StepRows) -> DividedPlan:
        """See `StepLayout.plan`."""
        checked = super(DividedTableLayout, self).plan(rows)
        return DividedPlan(rows, checked.used, self.share, self.block_size, self.width)

    def metadata(self, batch: TableBatch | StateTableBatch, block_size: int) -> UnifiedMetadata:
        """See `TableBatch.metadata`."""
        ranks = KeyRanks(self.group, self.share.count)
        return replace(batch.metadata(block_size), ranks=ranks)

    def logits_metadata(
        self, batch: TableBatch | StateTableBatch, block_size: int
    ) -> UnifiedMetadata | None:
        """None: the lengths are of earlier tokens alone."""
        return None

    def over(self, num_blocks: int, block_size: int, width: int) -> DividedTableLayout:
        """See `StepLayout.over`."""
        return DividedTableLayout(num_blocks, block_size, width, self.share, self.group)
