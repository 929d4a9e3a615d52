"""Exchanges and one-way copies of blocks, in captured graphs of a few fixed sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compiled_attn.cache.defrag.memory import CacheMemory, alias
from compiled_attn.cache.defrag.pairs import (
    PaddedPairs,
    Pairs,
    distinct_blocks,
    move_pairs,
    swap_pairs,
)
from compiled_attn.cache.kv_cache import PagedKVCache
from graphs import BucketEvent, WarmupGroup, WarmupReport
from graphs.capture.contract import Backend

__all__ = ["PAD_SIZES", "BlockSwap"]

PAD_SIZES = (8, 16, 32, 64, 128, 256, 512)

# By default inductor delays the gather of the sources until after the first write, for which it
# copies the cache; and it fuses all tensors into one loop, with more streams than are prefetched.
_OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {"options": {"reorder_for_locality": False, "max_fusion_size": 8}}
}


class BlockSwap(nn.Module):
    """Exchanges blocks in place, in all layers, K, V and scales in one graph.

    Lists of blocks are padded with the null block 0, exchanged with itself, to a few lengths, each
    captured once. :meth:`move` copies one way, with half the traffic.

    The module holds the memory of the cache as buffers (not persistent), viewed as rows of
    integers, one row per block. It is bound to that memory: moving or casting this module, or using
    it after the cache was moved, cast or replaced, is a ``RuntimeError``. Create it after
    ``cache.to(...)``.

    Args:
        buffers: a `PagedKVCache`, or tensors of which axis 0 is the blocks, or the slots of all
            blocks (``[num_blocks * block_size, ...]``): keys, values and scales of all layers, of
            any dtype, each block contiguous (every layout of `compat.paged`).
        num_blocks: blocks of the cache including the null block; only needed for flat slots, by
            default axis 0 of the first tensor.
        pad_sizes: lengths to capture, in pairs.
        backend: a name of `graphs.available_backends`, or a backend object.
        strict: :meth:`warmup` raises if a pad size cannot be captured; otherwise a larger one
            replaces it.
        exchanges: whether to capture :meth:`swap`, which `OnlineDefragmenter` does not need.

    Shape:
        - forward(sources ``[P]``, destinations ``[P]``) int64 blocks on the device of the cache ->
          None

    Raises:
        ValueError: no tensor, sizes that do not fit ``num_blocks``, a block that is not
            contiguous, tensors that share memory or are on several devices.
        TypeError: a buffer is not a tensor.

    Example::

        swap = BlockSwap(cache)
        swap.warmup()
        swap.swap([(7, 2), (9, 3)])  # 7 <-> 2, 9 <-> 3
        swap.move([(8, 4)])  # 8 -> 4
    """

    def __init__(
        self,
        buffers: PagedKVCache | Sequence[Tensor],
        num_blocks: int | None = None,
        *,
        pad_sizes: Sequence[int] = PAD_SIZES,
        backend: str | Backend = "eager",
        strict: bool = True,
        exchanges: bool = True,
    ) -> None:
        super().__init__()
        self._cache = CacheMemory(buffers, num_blocks)
        self.num_blocks = self._cache.num_blocks
        self.bytes_per_block = self._cache.bytes_per_block
        for number, rows in enumerate(self._cache.rows()):
            self.register_buffer(f"rows_{number}", rows, persistent=False)
            self.register_buffer(f"read_{number}", alias(rows), persistent=False)
        settings: dict[str, Any] = {
            "pad_sizes": pad_sizes,
            "device": self._cache.device,
            "backend": backend,
            "strict": strict,
            **_options(backend),
        }
        self._swaps = PaddedPairs(self, "swaps", **settings) if exchanges else None
        self._moves = PaddedPairs(_Overwrite(self), "moves", **settings)
        self._is_closed = False

    def forward(self, sources: Tensor, destinations: Tensor) -> None:
        """Exchanges the blocks at ``sources [P]`` with those at ``destinations [P]``.

        Nothing is checked: no block but 0 may occur twice.
        """
        memory = list(self._memory())
        for number, (rows, read) in enumerate(memory):
            try:
                _exchange(rows, read, sources, destinations)
            except BaseException:
                # Only what runs op by op can fail here, between two tensors.
                for done in memory[:number]:
                    _exchange(*done, sources, destinations)
                raise

    def overwrite(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies the blocks at ``sources [P]`` to ``destinations [P]``: the traced move.

        Nothing is checked: no destination but 0 may occur twice, or be a source.
        """
        for rows, read in self._memory():
            rows.index_copy_(0, destinations, read.index_select(0, sources))

    @property
    def pending(self) -> int:
        """Number of graphs that are not captured yet."""
        return sum(lists.pending for lists in self._lists())

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures a graph of the exchange (bucket axis ``swaps``) and one of the move (``moves``)
        for each pad size; no block changes.

        Raises:
            graphs.CaptureError: a pad size could not be captured (strict), or none.
            RuntimeError: it is closed, or the cache was moved.
        """
        self._check_open()
        self._check_memory()
        return WarmupGroup(*self._lists()).warmup(progress)

    def swap(self, pairs: Pairs) -> None:
        """Exchanges the two blocks of every pair: all pairs, or none.

        Args:
            pairs: ``(block, block)``, any number of them (more than the largest pad size run in
                several graph calls), or an integer array ``[N, 2]``; ``(0, 0)`` is padding.

        Raises:
            ValueError, TypeError: a block is out of range, the null block, or in two pairs; no
                block changed.
            RuntimeError: created without exchanges, not warmed up, closed, or the cache was
                moved. If a graph call fails, the exchanges of earlier calls are undone.
        """
        self._check_ready()
        if self._swaps is None:
            raise RuntimeError(
                "expected a BlockSwap with exchanges, got one without: "
                "create it with exchanges=True"
            )
        done: list[NDArray[np.int64]] = []
        try:
            for part in self._swaps.split(swap_pairs(pairs, self.num_blocks)):
                self._swaps.run(part)
                done.append(part)
        except BaseException:
            for part in reversed(done):  # an exchange is its own inverse
                self._swaps.run(part)
            raise

    def move(self, pairs: Pairs) -> None:
        """Copies blocks from sources to destinations.

        Args:
            pairs: ``(source, destination)`` as in :meth:`swap`; a source may occur twice.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`swap`; also if a destination is a source.
                If a graph call fails, destinations of earlier ones are overwritten.
        """
        self._check_ready()
        for part in self._moves.split(move_pairs(pairs, self.num_blocks)):
            self._moves.run(part)

    def take(self, blocks: Sequence[int] | NDArray[np.integer]) -> list[Tensor]:
        """Returns a copy of ``blocks``, ``[N, words]`` for each tensor of the cache.

        Raises:
            ValueError, TypeError: a block is out of range.
            RuntimeError: not warmed up, closed, or the cache was moved.
        """
        self._check_ready()
        at = self._index(blocks)
        return [read.index_select(0, at) for _, read in self._memory()]

    def put(self, blocks: Sequence[int] | NDArray[np.integer], contents: Sequence[Tensor]) -> None:
        """Writes the result of :meth:`take` to as many blocks; may be repeated.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`take`; `contents` has other shapes.
        """
        self._check_ready()
        at = self._index(blocks)
        memory = [rows for rows, _ in self._memory()]
        expected = [(len(at), *rows.shape[1:]) for rows in memory]
        if (got := [tuple(each.shape) for each in contents]) != expected:
            raise ValueError(
                f"expected contents of shapes {expected}, got {got}: pass what take() returned"
            )
        for rows, content in zip(memory, contents, strict=True):
            rows.index_copy_(0, at, content)

    def close(self) -> None:
        """Frees the graphs; may be called twice. Any use after it is an error."""
        self._is_closed = True
        for lists in self._lists():
            lists.close()

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        return (
            f"num_blocks={self.num_blocks}, tensors={len(self._cache.addresses)}, "
            f"bytes_per_block={self.bytes_per_block}"
        )

    def _memory(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self._cache.addresses)):
            yield self.get_buffer(f"rows_{number}"), self.get_buffer(f"read_{number}")

    def _lists(self) -> list[PaddedPairs]:
        return [lists for lists in (self._swaps, self._moves) if lists is not None]

    def _index(self, blocks: Sequence[int] | NDArray[np.integer]) -> Tensor:
        checked = distinct_blocks(blocks, self.num_blocks)
        return torch.from_numpy(checked).to(self._cache.device)

    def _check_ready(self) -> None:
        self._check_open()
        if not all(lists.is_ready for lists in self._lists()):
            raise RuntimeError(
                "expected captured graphs, got none: call warmup() before swap() and move()"
            )
        self._check_memory()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("expected an open BlockSwap, got a closed one: create a new one")

    def _check_memory(self) -> None:
        first = next(self._memory())[0]
        if first.data_ptr() != self._cache.addresses[0] or self._cache.has_moved():
            raise RuntimeError(
                "expected the cache that this BlockSwap was created for, but it was moved, cast or "
                "replaced: create a new BlockSwap"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSwap:
        # Module.to() and the like would move the rows away from the cache.
        rows = next(self._memory())[0]
        applied = fn(rows)
        if applied.device != rows.device or applied.data_ptr() != rows.data_ptr():
            raise RuntimeError(
                "expected a BlockSwap to stay with its cache, got a move of its buffers: "
                "move the cache, and create a new BlockSwap after that"
            )
        return self


def _options(backend: str | Backend) -> dict[str, Any]:
    return _OPTIONS.get(backend if isinstance(backend, str) else backend.name, {})


class _Overwrite(nn.Module):
    """The move as a module, for backends that look for its buffers."""

    def __init__(self, swap: BlockSwap) -> None:
        super().__init__()
        self.swap = swap

    def forward(self, sources: Tensor, destinations: Tensor) -> None:
        self.swap.overwrite(sources, destinations)


def _exchange(rows: Tensor, read: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Exchanges rows in place.

    ``read`` is the same memory, but compilers take it for another tensor: no write changes a
    destination before it is read, so that destinations need no temporary copy.
    """
    saved, taken = rows.index_select(0, sources), read.index_select(0, destinations)
    try:
        rows.index_copy_(0, sources, taken)
        rows.index_copy_(0, destinations, saved)
    except BaseException:
        rows.index_copy_(0, sources, saved)
        rows.index_copy_(0, destinations, taken)
        raise
