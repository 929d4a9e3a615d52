"""Exchanges and one-way copies of blocks, in captured graphs of a few fixed sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compiled_attn.cache.defrag.lists import (
    PaddedLists,
    Pairs,
    move_pairs,
    single_places,
    swap_pairs,
)
from compiled_attn.cache.defrag.rows import CacheMemory, twin
from compiled_attn.cache.kv_cache import PagedKVCache
from graphs import BucketEvent, WarmupGroup, WarmupReport
from graphs.capture.contract import Backend

__all__ = ["PAD_SIZES", "BlockSwap"]

PAD_SIZES = (8, 16, 32, 64, 128, 256, 512)

# Left to itself, inductor puts off the gather of the sources until after the first write, for the
# sake of which it then copies the cache; and it streams all tensors in one loop, more than the
# processor prefetches.
_OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {"options": {"reorder_for_locality": False, "max_fusion_size": 8}}
}


class BlockSwap(nn.Module):
    """Exchanges the content of blocks in place, in all layers, K, V and scales in one graph.

    Lists of places are padded with the null block 0, exchanged with itself, to a few lengths, each
    captured once. :meth:`move` is the one-way form with half the traffic.

    The module holds the memory of the cache as buffers (not persistent), seen as rows of integers,
    one row a block. It is bound to that memory: moving or casting this module is a
    ``RuntimeError``, and so is using it after the cache was moved, cast or replaced. Make it after
    ``cache.to(...)``.

    Args:
        buffers: a `PagedKVCache`, or tensors of which axis 0 is the blocks, or the slots of all
            blocks (``[num_blocks * block_size, ...]``): keys, values and scales of all layers, of
            any dtype, each block one piece of memory (every layout of `compat.paged`).
        num_blocks: blocks of the cache with the null block; only needed for flat slots, default
            axis 0 of the first tensor.
        pad_sizes: lengths to capture, in pairs.
        backend: how to capture: a name out of `graphs.available_backends`, or a backend object.
        strict: a pad size that cannot be captured is an error of :meth:`warmup`; otherwise a larger
            one serves its lists.
        exchanges: whether :meth:`swap` is captured; an `OnlineDefragmenter` does without.

    Attributes:
        num_blocks: blocks of the cache.
        bytes_per_block: bytes of a block in all tensors together.

    Shape:
        - forward(sources ``[P]``, destinations ``[P]``) int64 places on the device of the cache ->
          None

    Raises:
        ValueError: no tensor, sizes that do not fit ``num_blocks``, a block that is not one piece
            of memory, tensors that share memory or lie on several devices.
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
            self.register_buffer(f"read_{number}", twin(rows), persistent=False)
        settings: dict[str, Any] = {
            "pad_sizes": pad_sizes,
            "device": self._cache.device,
            "backend": backend,
            "strict": strict,
            **_options(backend),
        }
        self._swaps = PaddedLists(self, "swaps", **settings) if exchanges else None
        self._moves = PaddedLists(_Overwrite(self), "moves", **settings)
        self._is_closed = False

    def forward(self, sources: Tensor, destinations: Tensor) -> None:
        """Exchanges the blocks at ``sources [P]`` with those at ``destinations [P]``.

        Nothing is checked: no place but 0 may be there twice.
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
        """Copies the blocks at ``sources [P]`` over those at ``destinations [P]``: the traced move.

        Nothing is checked: no destination but 0 may be there twice, or be a source.
        """
        for rows, read in self._memory():
            rows.index_copy_(0, destinations, read.index_select(0, sources))

    @property
    def pending(self) -> int:
        """How many graphs are not captured yet."""
        return sum(lists.pending for lists in self._lists())

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures a graph of the exchange (bucket axis ``swaps``) and one of the move (``moves``)
        for each pad size; no block changes.

        Raises:
            graphs.CaptureError: a pad size could not be captured (strict), or none.
            RuntimeError: it is closed, or the cache is no longer where it was.
        """
        self._check_open()
        self._check_memory()
        return WarmupGroup(*self._lists()).warmup(progress)

    def swap(self, pairs: Pairs) -> None:
        """Exchanges the blocks at each two places: all pairs, or none.

        Args:
            pairs: ``(place, place)``, any number of them (more than the largest pad size run in
                several graph calls), or an integer array ``[N, 2]``; ``(0, 0)`` is padding.

        Raises:
            ValueError, TypeError: a place is out of range, the null block's or in two pairs; no
                block changed.
            RuntimeError: made without exchanges, not warmed up, closed, or the cache is no longer
                where it was. Where a graph call fails, the error is its own, and the exchanges of
                earlier calls are undone. (An interrupt has no such promise here: whether the
                exchange that it hit took place cannot be known. `OnlineDefragmenter` exchanges by
                :meth:`take`, :meth:`move` and :meth:`put`, each of which may be repeated.)
        """
        self._check_ready()
        if self._swaps is None:
            raise RuntimeError(
                "expected a BlockSwap with exchanges, got one without: make it with exchanges=True"
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
        """Copies blocks one way: what was at the destinations is lost, the sources stay.

        Args:
            pairs: ``(source, destination)`` places as in :meth:`swap`; a source may be there twice.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`swap`; also where a destination is a
                source. Where a graph call fails, destinations of earlier ones are overwritten.
        """
        self._check_ready()
        for part in self._moves.split(move_pairs(pairs, self.num_blocks)):
            self._moves.run(part)

    def take(self, places: Sequence[int] | NDArray[np.integer]) -> list[Tensor]:
        """Returns a copy of the blocks at ``places``, ``[N, words]`` for each tensor of the cache.

        Raises:
            ValueError, TypeError: a place is out of range, the null block's or there twice.
            RuntimeError: as :meth:`swap`.
        """
        self._check_ready()
        at = self._index(places)
        return [read.index_select(0, at) for _, read in self._memory()]

    def put(self, places: Sequence[int] | NDArray[np.integer], contents: Sequence[Tensor]) -> None:
        """Writes ``contents``, of :meth:`take`, to as many places; may be repeated.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`take`.
        """
        self._check_ready()
        at = self._index(places)
        for (rows, _), kept in zip(self._memory(), contents, strict=True):
            rows.index_copy_(0, at, kept)

    def close(self) -> None:
        """Frees the graphs; using it from now on is an error. May be called twice."""
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

    def _lists(self) -> list[PaddedLists]:
        return [lists for lists in (self._swaps, self._moves) if lists is not None]

    def _index(self, places: Sequence[int] | NDArray[np.integer]) -> Tensor:
        checked = single_places(places, self.num_blocks)
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
            raise RuntimeError("expected an open BlockSwap, got a closed one: make a new one")

    def _check_memory(self) -> None:
        first = next(self._memory())[0]
        if first.data_ptr() != self._cache.addresses[0] or self._cache.is_elsewhere():
            raise RuntimeError(
                "expected the cache where it was when this BlockSwap was made, but it was moved, "
                "cast or replaced: make a new BlockSwap"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSwap:
        # Module.to() and its like would part the rows from the cache, which is not ours to move.
        rows = next(self._memory())[0]
        applied = fn(rows)
        if applied.device != rows.device or applied.data_ptr() != rows.data_ptr():
            raise RuntimeError(
                "expected a BlockSwap to stay with its cache, got a move of its buffers: "
                "move the cache, and make a new BlockSwap after that"
            )
        return self


def _options(backend: str | Backend) -> dict[str, Any]:
    return _OPTIONS.get(backend if isinstance(backend, str) else backend.name, {})


class _Overwrite(nn.Module):
    """The move as a module, for backends that look for the buffers of one."""

    def __init__(self, swap: BlockSwap) -> None:
        super().__init__()
        self.swap = swap

    def forward(self, sources: Tensor, destinations: Tensor) -> None:
        self.swap.overwrite(sources, destinations)


def _exchange(rows: Tensor, read: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Exchanges rows in place. ``read`` is the same memory, for compilers a tensor of its own.

    It tells them that no write of this list changes a destination before it is read, so that those
    go straight to their new places.
    """
    kept, taken = rows.index_select(0, sources), read.index_select(0, destinations)
    try:
        rows.index_copy_(0, sources, taken)
        rows.index_copy_(0, destinations, kept)
    except BaseException:
        rows.index_copy_(0, sources, kept)
        rows.index_copy_(0, destinations, taken)
        raise
