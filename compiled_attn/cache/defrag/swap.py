"""One-way copies and exchanges of blocks, in captured graphs of a few fixed sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compiled_attn.cache.defrag.memory import CacheMemory, alias
from compiled_attn.cache.defrag.pairs import PaddedMoves, Pairs, move_pairs, swap_pairs
from compiled_attn.cache.kv_cache import PagedKVCache
from graphs import BucketEvent, WarmupReport
from graphs.capture.contract import Backend

__all__ = ["PAD_SIZES", "BlockSwap"]

PAD_SIZES = (8, 16, 32, 64, 128, 256, 512)

# By default inductor delays the gather of the sources until after the first write, for which it
# copies the cache; and it fuses all tensors into one loop, with more streams than are prefetched.
_OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {"options": {"reorder_for_locality": False, "max_fusion_size": 8}}
}


class BlockSwap(nn.Module):
    """Moves and exchanges blocks in place, in all layers, K, V and scales in one graph.

    Lists of blocks are padded with the null block 0, copied to itself, to a few lengths, each
    captured once.

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

    Attributes:
        num_blocks: blocks of the cache.
        bytes_per_block: bytes of a block in all tensors together.

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
    ) -> None:
        super().__init__()
        self._cache = CacheMemory(buffers, num_blocks)
        self.num_blocks = self._cache.num_blocks
        self.bytes_per_block = self._cache.bytes_per_block
        for number, rows in enumerate(self._cache.rows()):
            self.register_buffer(f"rows_{number}", rows, persistent=False)
            self.register_buffer(f"read_{number}", alias(rows), persistent=False)
        options = _OPTIONS.get(backend if isinstance(backend, str) else backend.name, {})
        self._moves = PaddedMoves(
            self,
            pad_sizes=pad_sizes,
            device=self._cache.device,
            backend=backend,
            strict=strict,
            **options,
        )
        self._is_closed = False

    def forward(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies the blocks at ``sources [P]`` to ``destinations [P]``.

        Nothing is checked: no destination but 0 may occur twice, or be a source.
        """
        # `read` is the same memory, but compilers take it for another tensor: they copy blocks
        # straight from place to place, without a buffer for the sources.
        for rows, read in self._memory():
            rows.index_copy_(0, destinations, read.index_select(0, sources))

    @property
    def pending(self) -> int:
        """Number of graphs that are not captured yet."""
        return self._moves.pending

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures the graph of each pad size (bucket axis ``moves``); no block changes.

        Raises:
            graphs.CaptureError: a pad size could not be captured (strict), or none.
            RuntimeError: it is closed, or the cache was moved.
        """
        self._check_open()
        self._check_memory()
        return self._moves.warmup(progress)

    def move(self, pairs: Pairs) -> None:
        """Copies blocks from sources to destinations.

        Args:
            pairs: ``(source, destination)``, any number of them (more than the largest pad size run
                in several graph calls), or an integer array ``[N, 2]``; ``(0, 0)`` is padding. A
                source may occur twice.

        Raises:
            ValueError, TypeError: a block is out of range or the null block, or a destination
                occurs twice or is a source; no block changed.
            RuntimeError: not warmed up, closed, or the cache was moved. If a graph call fails,
                destinations of earlier ones are overwritten.
        """
        self._check_ready()
        self._moves.run(move_pairs(pairs, self.num_blocks))

    def swap(self, pairs: Pairs) -> None:
        """Exchanges the two blocks of every pair: all pairs, or none.

        The second blocks are saved outside of the cache until the first ones have moved.

        Args:
            pairs: ``(block, block)``, as in :meth:`move`.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`move`, also if a block is in two pairs.
                If a copy fails, all blocks are restored.
        """
        self._check_ready()
        checked = swap_pairs(pairs, self.num_blocks)
        if not len(checked):
            return
        blocks = torch.from_numpy(checked).to(self._cache.device)
        sources, destinations = blocks.unbind(1)
        saved = [read.index_select(0, destinations) for _, read in self._memory()]
        is_moved = False
        try:
            self._moves.run(checked)
            is_moved = True
            self._write(sources, saved)
        except BaseException:
            if is_moved:
                self._moves.run(checked[:, ::-1])
            self._write(destinations, saved)
            raise

    def close(self) -> None:
        """Frees the graphs; may be called twice. Any use after it is an error."""
        self._is_closed = True
        self._moves.close()

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        return (
            f"num_blocks={self.num_blocks}, tensors={len(self._cache.addresses)}, "
            f"bytes_per_block={self.bytes_per_block}"
        )

    def _memory(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self._cache.addresses)):
            yield self.get_buffer(f"rows_{number}"), self.get_buffer(f"read_{number}")

    def _write(self, blocks: Tensor, contents: Sequence[Tensor]) -> None:
        for (rows, _), content in zip(self._memory(), contents, strict=True):
            rows.index_copy_(0, blocks, content)

    def _check_ready(self) -> None:
        self._check_open()
        if not self._moves.is_ready:
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
