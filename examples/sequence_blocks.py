"""The blocks of one batch of sequences that start together and finish one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compiled_attn.cache.blocks import BlockPool, OutOfBlocks


class SequenceBlocks:
    """Block tables of a batch, for a generation loop without a scheduler.

    Row b of every tensor is prompt b. A finished row frees its blocks and becomes padding: length
    0, position 0, null block 0. Several batches may share a pool.

    Args:
        pool: allocates the blocks.
        lengths: tokens of each prompt, at least 1.

    Raises:
        OutOfBlocks: the pool has no room for all prompts; the batch holds no blocks then.
    """

    def __init__(self, pool: BlockPool, lengths: Sequence[int]) -> None:
        self.pool = pool
        self.lengths = torch.tensor(lengths, dtype=torch.int32)  # [B]
        self.running = torch.ones(len(lengths), dtype=torch.bool)  # [B]
        for row in range(len(lengths)):
            pool.add((self, row))
        try:
            self._reserve(self.lengths)
        except OutOfBlocks:
            self.free()
            raise

    def update(self, finished: Tensor) -> None:
        """Frees finished rows and reserves one more position for all others.

        Args:
            finished: ``[B]`` bool, where the token just chosen ends the sequence. Rows that
                finished before are ignored.

        Raises:
            OutOfBlocks: the running rows need more blocks than are free; nothing has changed.
        """
        finished, running = self.running & finished, self.running & ~finished
        lengths = self.lengths + running
        self._check_room(lengths, running, finished)
        self._free(finished)
        self._reserve(lengths)
        self.lengths += running

    def block_table(self) -> Tensor:
        """Returns the physical blocks of each row, ``[B, W]`` int32, padded with null block 0."""
        tables = [
            self.pool.table((self, row)).blocks if running else []
            for row, running in enumerate(self.running.tolist())
        ]
        width = max(1, *map(len, tables))
        padded = [[*blocks, *[0] * (width - len(blocks))] for blocks in tables]
        return torch.from_numpy(np.asarray(padded, np.int32))

    def last_positions(self) -> Tensor:
        """Returns the position of each newest token, ``[B]`` int32: how many come before it."""
        return (self.lengths - 1).clamp_min(0)

    def free(self) -> None:
        """Frees the blocks of all running rows."""
        self._free(self.running.clone())

    def _check_room(self, lengths: Tensor, running: Tensor, finished: Tensor) -> None:
        room = self.pool.available + sum(
            len(self.pool.table((self, row)).blocks) for row in _numbers(finished)
        )
        for row in _numbers(running):
            length, table = int(lengths[row]), self.pool.table((self, row))
            needed = -(-length // self.pool.block_size) - len(table.blocks)
            if needed > room:
                total = self.pool.num_blocks - 1
                raise OutOfBlocks((self, row), length, needed, room, 0, total)
            room -= needed

    def _reserve(self, lengths: Tensor) -> None:
        for row in _numbers(self.running):
            self.pool.reserve((self, row), int(lengths[row]))

    def _free(self, rows: Tensor) -> None:
        for row in _numbers(rows):
            self.pool.free((self, row))
        self.lengths[rows] = 0
        self.running[rows] = False


def _numbers(rows: Tensor) -> list[int]:
    found: list[int] = rows.nonzero().flatten().tolist()
    return found
