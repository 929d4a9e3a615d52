"""The block side of an engine: who holds which block, where it lies, and what is copied."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from compiled_attn.blocks import BlockPool
from compiled_attn.cache import PagedKVCache
from compiled_attn.defrag import BlockSwap, OnlineDefragmenter
from compiled_attn.engine.config import EngineConfig
from graphs import BucketEvent, WarmupReport

__all__ = ["BlockMemory"]

_PAIRS = 16


class BlockMemory:
    """A pool, the cache it hands out, and the captured copies that keep both in step.

    Args:
        cache: of the model.
        config: of the engine.

    Attributes:
        pool: who holds which block.
        defragmenter: None where the configuration turns it off.
    """

    def __init__(self, cache: PagedKVCache, config: EngineConfig) -> None:
        self.pool = BlockPool(
            cache.num_blocks,
            cache.block_size,
            partial_hits=config.partial_hits and cache.block_size > 1,
        )
        self._swap = BlockSwap(
            cache, pad_sizes=(_PAIRS,), backend=config.backend, strict=config.strict
        )
        self._range_peak = 0
        self.defragmenter: OnlineDefragmenter | None = None
        if config.defrag_waste is not None:
            self.defragmenter = OnlineDefragmenter(
                self.pool.places,
                self._swap,
                max_waste=config.defrag_waste,
                min_gap=1 if config.defrag_waste == 0 else config.defrag_min_gap,
                max_blocks=_PAIRS,
            )

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures the copies; raises what `BlockSwap.warmup` raises."""
        return self._swap.warmup(progress)

    def settle(self) -> None:
        """Performs what is due before a step: copies on write, then a bounded defragmentation.

        Tables resolved before are out of date after it.
        """
        copies = self.pool.pop_copies()
        if copies:
            self._swap.move(self.pool.places.resolve_all(np.array(copies)))
        if self.defragmenter is not None and self.defragmenter.is_due:
            self.defragmenter.defragment()

    def table(self, request_id: Hashable) -> NDArray[np.int64]:
        """Where the blocks of a request lie now, ``[blocks]``."""
        table = self.pool.table(request_id)
        return self.pool.places.resolve_all(table.array[: len(table.blocks)]).astype(
            np.int64, copy=False
        )

    def figures(self) -> dict[str, float]:
        """Copies, moves and the spread of the blocks so far, for the report."""
        stats = self.pool.stats()
        moved = self.defragmenter.totals if self.defragmenter is not None else None
        return {
            "copies_on_write": stats.copies,
            "partial_hit_tokens": stats.partial_hit_tokens,
            "evictions": stats.evictions,
            "peak_used": stats.peak_used,
            "range_high_water": stats.high_water,
            **{f"defrag_{name}": n for name, n in (asdict(moved) if moved else {}).items()},
        }
