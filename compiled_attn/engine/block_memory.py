"""The block side of an engine: who holds which block, where it lies, and what is copied."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict, replace

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_attn.cache.blocks import BlockPool, PoolStats
from compiled_attn.cache.defrag import BlockSwap, OnlineDefragmenter
from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.engine.config import EngineConfig
from graphs import BucketEvent, WarmupReport

__all__ = ["BlockMemory"]

_PAIRS = 16
_SUMS = "allocations evictions copies preemptions queried_tokens hit_tokens partial_hit_tokens"
_MAXIMA = "high_water peak_used"


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
        self._cache = cache
        self._config = config
        self._swap = BlockSwap(
            cache, pad_sizes=(_PAIRS,), backend=config.backend, strict=config.strict
        )
        self._past: PoolStats | None = None
        self.pool = self._new_pool()
        self.defragmenter = self._new_defragmenter(self.pool)

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures the copies; raises what `BlockSwap.warmup` raises."""
        return self._swap.warmup(progress)

    def settle(self) -> None:
        """Performs what is due before a step: copies on write, then a bounded defragmentation.

        Tables resolved before are out of date after it. What an exception interrupts is still due.
        """
        copies = self.pool.pending_copies()
        if copies:
            self._swap.move(self.pool.places.resolve_all(np.array(copies)))
            self.pool.copied(copies)
        if self.defragmenter is not None and self.defragmenter.is_due:
            self.defragmenter.defragment()

    def reset(self) -> None:
        """Forgets all requests and all content, whatever state an exception left them in.

        What was counted stays counted.
        """
        past, pool = self._stats_if_whole(), self._new_pool()
        defragmenter = self._new_defragmenter(pool)
        if defragmenter is not None and self.defragmenter is not None:
            defragmenter.totals = self.defragmenter.totals
        self._past, self.pool, self.defragmenter = past, pool, defragmenter

    def table(self, request_id: Hashable) -> NDArray[np.int64]:
        """Where the blocks of a request lie now, ``[blocks]``."""
        table = self.pool.table(request_id)
        return self.pool.places.resolve_all(table.array[: len(table.blocks)]).astype(
            np.int64, copy=False
        )

    def sound_hits(self, request_id: Hashable) -> int:
        """How many blocks that a request found in the prefix cache are finite, up to the first
        that is not: a common prefix stays, whoever fails behind it.
        """
        hits = self.pool.table(request_id).num_cached_tokens // self._cache.block_size
        places = torch.from_numpy(self.table(request_id)[:hits])
        sound = torch.ones(hits, dtype=torch.bool)
        for buffer in self._cache.buffers():
            if buffer.is_floating_point():
                blocks = buffer.unflatten(0, (self._cache.num_blocks, -1))[places.to(buffer.device)]
                sound &= torch.isfinite(blocks.float()).flatten(1).all(1).cpu()
        return int(sound.cumprod(0).sum())

    def stats(self) -> PoolStats:
        """The figures of the pool, and of those before it that were given up."""
        now, past = self.pool.stats(), self._past
        if past is None:
            return now
        sums = {name: getattr(now, name) + getattr(past, name) for name in _SUMS.split()}
        most = {name: max(getattr(now, name), getattr(past, name)) for name in _MAXIMA.split()}
        return replace(now, **sums, **most)

    def figures(self) -> dict[str, float]:
        """Copies, moves and the spread of the blocks so far, for the report."""
        stats = self.stats()
        moved = self.defragmenter.totals if self.defragmenter is not None else None
        return {
            "copies_on_write": stats.copies,
            "partial_hit_tokens": stats.partial_hit_tokens,
            "evictions": stats.evictions,
            "peak_used": stats.peak_used,
            "range_high_water": stats.high_water,
            **{f"defrag_{name}": n for name, n in (asdict(moved) if moved else {}).items()},
        }

    def _stats_if_whole(self) -> PoolStats | None:
        try:
            return self.stats()
        except Exception:  # a pool torn by an interrupt: its counts since the last reset are lost
            return self._past

    def _new_pool(self) -> BlockPool:
        size = self._cache.block_size
        return BlockPool(
            self._cache.num_blocks,
            size,
            partial_hits=self._config.partial_hits and size > 1,
            key=self._config.prefix_key,
        )

    def _new_defragmenter(self, pool: BlockPool) -> OnlineDefragmenter | None:
        waste = self._config.defrag_waste
        if waste is None:
            return None
        return OnlineDefragmenter(
            pool.places,
            self._swap,
            max_waste=waste,
            min_gap=1 if waste == 0 else self._config.defrag_min_gap,
            max_blocks=_PAIRS,
        )
