"""Checks each step of an engine with the sanitizer of `compiled_attn.testing`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.cache.blocks import BlockPool, BlockTable
from compiled_attn.cache.blocks.grouped import GroupedPool
from compiled_attn.cache.blocks.hybrid import HybridPool
from compiled_attn.cache.blocks.window import blocks_before
from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.engine.config import ConfigError
from compiled_attn.engine.executor import Executor, PlannedStep
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.testing.sanitizer.corrupt import CorruptCache
from compiled_attn.testing.sanitizer.ledger import Ledger, NearTags, StepTokens, poison

__all__ = ["StepWatch", "watched_cache"]


class StepWatch:
    """Fills the shadow before each step, checks the step after it, and poisons freed blocks.

    The expected tags come from the requests and the block tables of the pool, never from the
    tensors of the step. Slots of recurrent states have no tags: those that hold no state are
    poisoned, and `StatePool.advance` checks whose and of how many tokens the others are.

    Args:
        cache: a cache with a shadow.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        assert cache.shadow is not None
        self._cache = cache
        self._free = np.ones(cache.num_blocks, np.bool_)
        self._clean = np.ones(cache.num_blocks, np.bool_)  # not written since it was freed
        self._pool: BlockPool | None = None
        self._exchanges = 0
        self._poisoned: set[int] = set()  # slots of states
        self._seen: dict[Hashable, tuple[BlockTable, int]] = {}  # block table, number of its blocks
        self._ledger = Ledger(
            cache.shadow, self._tags, cache.num_blocks, self._is_free, near=self._near_tags
        )

    @property
    def ledger(self) -> Ledger:
        """The record of requests, writes and freed blocks."""
        return self._ledger

    def scheduled(self, step: ScheduledStep, pool: BlockPool) -> None:
        """Compares the pool with the requests of a step, and poisons freed blocks.

        Raises:
            CorruptCache: the pool gave a request a block that another one owns, or freed a block
                that is in use.
        """
        self._ledger.step += 1
        parts = _parts(step, pool)
        fresh = self._fresh(parts, pool)
        if pool.num_exchanges != self._exchanges:
            # Moves wrote to blocks that were free, and may be again: their owner was preempted.
            self._exchanges = pool.num_exchanges
            self._clean[1:] = False
        self._free = pool.free_mask()
        self._check_pool(parts, fresh, pool)
        # A block that is in use again still holds the data of its previous owner.
        self._reset([block for block in fresh if not self._clean[block]])
        self._reset_near(np.fromiter(fresh, np.int64))
        self._clean &= self._free
        self._reset(np.flatnonzero(self._free & ~self._clean))
        self._clean |= self._free
        if isinstance(pool, HybridPool):
            self._poison_states(pool, parts)

    def _poison_states(self, pool: HybridPool, parts: Sequence[StepTokens]) -> None:
        assert self._cache.states is not None
        unused = {0, *pool.states.free}
        unused |= {pool.states.slot(part.request) for part in parts if not part.start}
        self._cache.states.fill_(math.nan, sorted(unused - self._poisoned))
        self._poisoned = unused & {0, *pool.states.free}  # the others are written now

    def before(self, step: PlannedStep, pool: BlockPool) -> None:
        """Sets what the step is expected to read and write.

        Raises:
            CorruptCache: two tokens have one slot.
        """
        self._ledger.begin(_parts(step.parts, pool), int(step.plan.rows.logits.sum()))

    def after(self) -> None:
        """Raises CorruptCache if the step read or wrote a wrong slot; waits for the step."""
        try:
            self._ledger.check(used=True)
        except CorruptCache:
            self._clean[1:] = False  # it may have written to any block
            raise

    def _fresh(self, parts: Sequence[StepTokens], pool: BlockPool) -> dict[int, StepTokens]:
        """Returns blocks allocated to requests since their last step, without prefix-cache hits."""
        if pool is not self._pool:
            self._pool = pool
            self._seen.clear()
        fresh: dict[int, StepTokens] = {}
        for part in parts:
            table, count = pool.table(part.request), len(part.blocks)
            before, known = self._seen.get(part.request, (None, 0))
            if before is table and known == count:
                continue
            first = -(-part.start // pool.block_size)
            for block in part.blocks[max(first, known if before is table else 0) :]:
                if block in fresh:
                    self._refuse("wrong_owner", int(block), part, fresh[block].request)
                fresh[int(block)] = part
            self._seen[part.request] = table, count
        if len(self._seen) > pool.num_requests:
            self._seen = {each: seen for each, seen in self._seen.items() if each in pool}
        return fresh

    def _check_pool(
        self, parts: Sequence[StepTokens], fresh: dict[int, StepTokens], pool: BlockPool
    ) -> None:
        tables = {each: pool.table(each).blocks for each in pool.requests}
        held = np.concatenate([np.array(blocks, np.int64) for blocks in tables.values()])
        counts = np.bincount(held, minlength=pool.num_blocks)
        counts[0] = 0  # released blocks
        wrong = {block: "wrong_owner" for block in fresh if counts[block] != 1}
        size = pool.block_size
        for part in parts:
            for block in part.blocks[part.start // size : -(-(part.start + part.count) // size)]:
                if counts[block] != 1:
                    wrong.setdefault(int(block), "shared_write")
        # A block with too few references is free, or will be while a request holds it.
        free = np.flatnonzero((self._free & (counts > 0)) | (pool.refcounts < counts))
        wrong.update((int(block), "use_after_free") for block in free)
        for block, kind in wrong.items():
            owners = [each for each, blocks in tables.items() if block in blocks]
            mine = [part for part in parts if block in part.blocks]
            if mine:
                part = fresh.get(block, mine[-1])
                self._refuse(kind, block, part, *(each for each in owners if each != part.request))

    def _refuse(self, kind: str, block: int, part: StepTokens, *others: Hashable) -> NoReturn:
        self._seen.clear()
        holds = f", which request {others[0]!r} has too" if others else ""
        position = list(part.blocks).index(block) * self._cache.block_size
        location = {"request": part.request, "block": block, "position": position}
        self._ledger.raise_for(kind, f"has block {block}{holds}", **location)

    def _reset(self, blocks: Sequence[int] | NDArray[np.int64]) -> None:
        if len(blocks):
            at = np.asarray(blocks, np.int64)
            for name, buffer in self._cache.buffers_of(near=False).items():
                if not name.startswith("tag_"):
                    poison(buffer, at, self._cache.num_blocks)
            self._ledger.freed(at, self._ledger.step - 1)
            self._reset_near(at)

    def _reset_near(self, blocks: NDArray[np.int64]) -> None:
        """Poisons the near blocks of these blocks, which were lent to others before."""
        if self._cache.near is None or not isinstance(self._pool, GroupedPool):
            return
        at = torch.from_numpy(self._pool.near.near_of[blocks].astype(np.int64))
        at = at[at > 0]
        for name, buffer in self._cache.buffers_of(near=True).items():
            if name.startswith("tag_"):
                buffer.index_fill_(0, at.to(buffer.device), 0)
            else:
                poison(buffer, at.numpy(), self._cache.near.num_blocks)

    def _tags(self) -> list[Tensor]:
        named = self._cache.buffers_of(near=False).items()
        return [buffer for name, buffer in named if name.startswith("tag_")]

    def _near_tags(self) -> NearTags | None:
        if self._cache.near is None or not isinstance(self._pool, GroupedPool):
            return None
        named = self._cache.buffers_of(near=True).items()
        tags = [buffer for name, buffer in named if name.startswith("tag_")]
        return NearTags(self._cache.near.layers, tags, self._pool.near.near_of)

    def _is_free(self, block: int) -> bool:
        return bool(self._free[block])


def _parts(step: ScheduledStep, pool: BlockPool) -> list[StepTokens]:
    """What the requests of a step compute, with their blocks."""
    size, window = pool.block_size, pool.window
    return [
        StepTokens(
            sequence.request_id, [*sequence.tokens, *draft] if draft else sequence.tokens,
            start, count, pool.table(sequence.request_id).blocks, sequence.salt,
            blocks_before(start, window, size) * size,
        )
        for sequence, count, start, draft in step
    ]  # fmt: skip


def watched_cache(executor: Executor) -> PagedKVCache:
    """Returns the cache of an executor, which has a shadow.

    Raises:
        ConfigError: the executor has no such cache: it uses several ranks or another process.
    """
    cache = getattr(executor, "cache", None)
    if executor.report().ranks > 1 or not isinstance(cache, PagedKVCache) or cache.shadow is None:
        raise ConfigError(
            f"expected sanitize with the executor of one process, got {type(executor).__name__}: "
            "use it without ranks, or leave sanitize out"
        )
    return cache
