"""The blocks of one batch of sequences that start together and end each at its own time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks import BlockPool, OutOfBlocks

Lengths: TypeAlias = Sequence[int] | NDArray[np.integer[Any]] | Tensor
Mask: TypeAlias = Sequence[bool] | NDArray[np.bool_] | Tensor


class SequenceBlocks:
    """Blocks for a batch of prompts, one more position for each sequence after every token.

    For a generation loop without a scheduler: all prompts start at once, row b of every tensor is
    prompt b for ever. A row runs until ``update`` hears that it finished. Its blocks are free at
    once then, its length is 0 and its table is all null block 0, so that a step of the whole batch
    computes it as padding. Several batches may share a pool, also with requests of their own.

    ``update`` is array arithmetic; Python work is done only for the rows that finish or whose last
    block is full. An error leaves batch and pool as they were. Not thread-safe.

    Args:
        pool: where the blocks come from. It counts the blocks of a row as full; how many of their
            slots are not, ``fragmented_bytes`` knows.
        lengths: tokens of each prompt, ints ``[B]``, each at least 1.
        device: of the tensors that the methods return; None: the CPU.

    Raises:
        OutOfBlocks: the pool has no room for all prompts; none of them holds blocks then.
        TypeError, ValueError: ``lengths`` are not integers, not of this shape or below 1.

    Example::

        blocks = SequenceBlocks(BlockPool(num_blocks=100, block_size=16), [5, 32, 17])
        ...  # write the prompts through blocks.block_table(), choose the first tokens
        blocks.update(tokens == end)
        while blocks.running.any():
            ...  # write the tokens at blocks.last_positions(), choose the next
            blocks.update(tokens == end)
        blocks.free()
    """

    def __init__(
        self, pool: BlockPool, lengths: Lengths, *, device: torch.device | str | None = None
    ) -> None:
        self.pool = pool
        self.device = torch.device("cpu" if device is None else device)
        self._lengths = _prompt_lengths(lengths)  # [B], 0 where finished, like the next
        self._counts = -(-self._lengths // pool.block_size)
        self._running = np.ones(len(self._lengths), dtype=np.bool_)
        self._is_freed = False
        self._exchanges = pool.num_exchanges
        # Python integers, which cannot overflow and then seem to fit.
        self._expect_room(sum(self._counts.tolist()), sum(self._lengths.tolist()))
        self._table = np.zeros((len(self._lengths), int(self._counts.max())), dtype=np.int32)
        for row, count in enumerate(self._counts.tolist()):
            pool.add((self, row))
            self._table[row, :count] = pool.reserve((self, row), count * pool.block_size)

    @property
    def running(self) -> Tensor:
        """The sequences that have not finished, ``[B]`` bool."""
        self._expect_held()
        return self._tensor(self._running.copy())

    @property
    def lengths(self) -> Tensor:
        """Positions of each sequence, the one of its newest token too, ``[B]`` int32."""
        self._expect_held()
        return self._tensor(self._lengths.astype(np.int32))

    def update(self, finished: Mask | None = None) -> None:
        """Free the sequences that finished, then hold one more position for all others.

        Call it with the end-of-sequence mask of the tokens just chosen. Where a token goes on, its
        position is ``last_positions()`` from now on; one that ended its sequence needs none.

        Args:
            finished: bools ``[B]``, True where the newest token is the last. What it says of rows
                that finished before is ignored. None: nothing finished.

        Raises:
            OutOfBlocks: not enough blocks, those of the finished sequences counted as free.
            TypeError, ValueError: ``finished`` is not a mask of this shape.
            RuntimeError: the batch is freed.
        """
        self._expect_held()
        ending = self._running & self._mask(finished)
        going = self._running & ~ending
        full = np.flatnonzero(going & (self._lengths == self._counts * self.pool.block_size))
        length = int(self._lengths[going].sum() + going.sum())
        self._expect_room(len(full), length, int(self._counts[ending].sum()))
        self._release(ending)
        self._extend(full)
        self._lengths[going] += 1

    def block_table(self, pad_to: int | None = None) -> Tensor:
        """Return where the positions lie, ``[B, W]`` int32, padded with the null block 0.

        Position p of row b is slot ``p % block_size`` of block ``[b, p // block_size]`` of the
        cache. W is ``pad_to``, or the blocks of the longest row, at least 1. A new tensor; make
        another after each ``update`` and after each defragmentation.

        Raises:
            ValueError: ``pad_to`` is shorter than the longest row.
            RuntimeError: the batch is freed.
        """
        self._expect_held()
        longest = max(1, int(self._counts.max()))
        width = longest if pad_to is None else whole("pad_to", pad_to, 1)
        if width < longest:
            raise ValueError(
                f"expected pad_to >= {longest}, the blocks of the longest sequence, got {width}: "
                "take a wider bucket"
            )
        table = np.zeros((len(self._table), width), dtype=np.int32)
        self._follow_moves()
        table[:, :longest] = self._table[:, :longest]
        return self._tensor(table)

    def last_positions(self) -> Tensor:
        """Return the position of each newest token, ``lengths - 1``, ``[B]`` int32.

        This is how many tokens come before it: ``cache_seqlens`` of a step that appends it. 0 for
        finished sequences, which thereby write to the null block.
        """
        self._expect_held()
        return self._tensor(self._last().astype(np.int32))

    def last_slots(self) -> Tensor:
        """Return the flat cache slot of each newest token, ``[B]`` int64, 0 where finished."""
        self._expect_held()
        return self._tensor(self._slots(np.arange(len(self._lengths)), self._last()))

    def slots(self) -> Tensor:
        """Return the flat cache slots of all positions, row after row, ``[lengths.sum()]`` int64.

        ``block * block_size + offset``: where packed prompts are written to.
        """
        self._expect_held()
        rows = np.repeat(np.arange(len(self._lengths)), self._lengths)
        starts = np.cumsum(self._lengths) - self._lengths
        return self._tensor(self._slots(rows, np.arange(len(rows)) - starts[rows]))

    def fragmented_bytes(self, bytes_per_slot: int) -> int:
        """Return the bytes of held slots without a position; a slot takes this over all layers."""
        self._expect_held()
        slots = int(self._counts.sum()) * self.pool.block_size - int(self._lengths.sum())
        return slots * whole("bytes_per_slot", bytes_per_slot, 1)

    def free(self) -> None:
        """Give up all blocks that are left; any use after this is a ``RuntimeError``."""
        self._expect_held()
        self._release(self._running.copy())
        self._is_freed = True

    def __len__(self) -> int:
        return len(self._lengths)

    def __repr__(self) -> str:
        state = "freed" if self._is_freed else f"{int(self._running.sum())} running"
        return f"SequenceBlocks({len(self)} sequences, {state}, {int(self._counts.sum())} blocks)"

    def _release(self, rows: NDArray[np.bool_]) -> None:
        for row in np.flatnonzero(rows).tolist():
            self.pool.free((self, row))
        self._table[rows] = 0
        self._counts[rows] = 0
        self._lengths[rows] = 0
        self._running[rows] = False

    def _extend(self, rows: NDArray[np.intp]) -> None:
        """Hold one more block for each of ``rows``."""
        if len(rows) and self._counts[rows].max() == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        for row in rows.tolist():
            held = int(self._counts[row])
            reserved = self.pool.reserve((self, row), (held + 1) * self.pool.block_size)
            self._table[row, held] = reserved[0]
        self._counts[rows] += 1

    def _last(self) -> NDArray[np.int64]:
        return np.maximum(self._lengths - 1, 0)

    def _slots(
        self, rows: NDArray[np.integer[Any]], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        number, offset = np.divmod(positions, self.pool.block_size)
        self._follow_moves()
        blocks = self._table[rows, number].astype(np.int64)
        return blocks * self.pool.block_size + offset

    def _follow_moves(self) -> None:
        """Reads all tables again if a defragmenter has moved blocks since."""
        if self._exchanges != self.pool.num_exchanges:
            self._exchanges = self.pool.num_exchanges
            for row in np.flatnonzero(self._running).tolist():
                count = int(self._counts[row])
                self._table[row, :count] = self.pool.table((self, row)).array[:count]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _mask(self, finished: Mask | None) -> NDArray[np.bool_]:
        if finished is None:
            return np.zeros(len(self), dtype=np.bool_)
        mask = _array(finished)
        if mask.dtype != np.bool_:
            raise TypeError(
                f"expected a mask of bools, got {mask.dtype}: compare tokens with the end token"
            )
        if mask.shape != self._running.shape:
            raise ValueError(
                f"expected a mask of shape [{len(self)}], a bool for each sequence, "
                f"got {list(mask.shape)}: keep the finished ones in it"
            )
        return mask

    def _expect_room(self, needed: int, length: int, freed: int = 0) -> None:
        if needed > self.pool.available + freed:
            stats = self.pool.stats()
            free = stats.free + freed
            raise OutOfBlocks(self, length, needed, free, stats.cached, stats.total)

    def _expect_held(self) -> None:
        if self._is_freed:
            raise RuntimeError(f"expected a batch that holds blocks, got {self!r}: make a new one")


def _prompt_lengths(lengths: Lengths) -> NDArray[np.int64]:
    found = _array(lengths)
    if found.ndim != 1 or not found.size:
        raise ValueError(
            f"expected lengths of shape [B] with B >= 1, got {list(found.shape)}: "
            "pass one length for each prompt"
        )
    if found.dtype.kind not in "iu":
        raise TypeError(f"expected integer lengths, got {found.dtype}: pass lengths, not prompts")
    copied = found.astype(np.int64)
    if copied.min() < 1:
        row = int(copied.argmin())
        raise ValueError(
            f"expected lengths >= 1, got {copied[row]} for prompt {row}: leave empty prompts out"
        )
    return copied


def _array(values: Lengths | Mask) -> NDArray[Any]:
    if not isinstance(values, Tensor):
        return np.asarray(values)
    if values.dtype.is_floating_point or values.dtype.is_complex:
        raise TypeError(f"expected integers or bools, got {values.dtype}: convert them with .to()")
    numbers: NDArray[Any] = values.detach().cpu().numpy()
    return numbers
