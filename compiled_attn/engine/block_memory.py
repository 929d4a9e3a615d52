"""The blocks of an engine: the pool, the tables of running requests, and defragmentation."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import asdict, replace

from compiled_attn.cache.blocks import BlockPool, BlockTable, PoolStats
from compiled_attn.cache.blocks.grouped import GroupedPool
from compiled_attn.cache.blocks.hybrid import HybridPool
from compiled_attn.cache.defrag import OnlineDefragmenter
from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.executor import COPIES, Executor, PlannedStep
from compiled_attn.step import RequestTable

__all__ = ["BlockMemory", "StepTables"]


class StepTables:
    """Updates a `RequestTable` from the block tables of a pool.

    Only blocks that a request gained since the last step are written. Rows of finished requests are
    freed and the gaps closed, so that a step can read its rows in place. A rollback replaces the
    tables together with their pool.
    """

    def __init__(self, pool: BlockPool, max_requests: int, max_blocks: int) -> None:
        self._pool = pool
        self._sizes = max_requests, max_blocks
        self._forget_blocks()

    def _forget_blocks(self) -> None:
        self._swaps = self._pool.num_exchanges
        self._rows = RequestTable(*self._sizes, in_place=True)
        self._seen: dict[Hashable, tuple[BlockTable, int, int, int]] = {}

    def of(
        self, request_ids: Iterable[Hashable], changed: Iterable[Hashable] | None = None
    ) -> RequestTable:
        """Returns the table of these requests; only ``changed`` ones (None: all) got blocks."""
        if self._swaps != self._pool.num_exchanges:  # blocks were moved
            self._forget_blocks()
            changed = None
        table_of, seen = self._pool.table, self._seen
        for request_id in request_ids if changed is None else changed:
            table = table_of(request_id)
            blocks = table.blocks
            count, last = len(blocks), blocks[-1] if blocks else 0
            state = table, count, last, table.num_released
            if (found := seen.get(request_id)) == state:
                continue
            before, known, known_last, _ = found or (None, 0, 0, 0)
            if before is not table:
                self._begin(request_id)
                known = 0
            elif known and blocks[known - 1] != known_last:
                known -= 1
            if table.num_released:
                self._rows.release(request_id, table.num_released)
                known = max(known, table.num_released)
            if known < count:
                self._rows.write(request_id, known, table.array[known:count])
            seen[request_id] = state
        if len(seen) > self._pool.num_requests:
            self._close_up()
        return self._rows

    def _begin(self, request_id: Hashable) -> None:
        if request_id in self._rows:
            self._rows.remove(request_id)
        if not self._rows.num_free:
            self._close_up()
        pool = self._pool
        slot = pool.states.slot(request_id) if isinstance(pool, HybridPool) else 0
        self._rows.add(request_id, state_slot=slot)

    def _close_up(self) -> None:
        for gone in [each for each in self._seen if each not in self._pool]:
            self._rows.remove(gone)
            del self._seen[gone]
        self._rows.close_gaps()


_SUMS = "allocations evictions copies preemptions queried_tokens hit_tokens"
_MAXIMA = "high_water peak_used"


class BlockMemory:
    """Allocates the blocks of an executor's cache, and defragments them.

    Attributes:
        pool: allocates blocks.
        defragmenter: None if the configuration disables it, or fragmentation costs nothing.
    """

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        self._executor = executor
        self._config = config
        self.defragmenter: OnlineDefragmenter | None = None
        self._renew(self._new_pool(), None)

    def settle(self) -> None:
        """Copies states to and from snapshots before a step, and defragments a bounded number of
        blocks, if that is due.

        Tables read before are stale afterwards.
        """
        if isinstance(self.pool, HybridPool) and (pairs := self.pool.states.pending()):
            self._executor.copy_states(pairs)
            self.pool.states.copied()
        if self.defragmenter is not None and self.defragmenter.is_due:
            self.defragmenter.defragment()

    def begin(self, step: PlannedStep) -> None:
        """Notes which recurrent states a step computes, just before it is launched.

        Raises:
            RuntimeError: a request would continue from states that are not its own.
        """
        if isinstance(self.pool, HybridPool):
            parts = step.parts
            requests = (sequence.request_id for sequence in parts.sequences)
            slots = step.plan.rows.state_slots
            self.pool.states.advance(requests, slots, parts.starts, parts.counts)

    def reset(self) -> None:
        """Replaces the pool by an empty one; works in any state that an exception left.

        The statistics are not reset.
        """
        past = self._stats_if_whole()
        self._renew(self._new_pool(), past)

    def tables(
        self, request_ids: Iterable[Hashable], changed: Iterable[Hashable] | None = None
    ) -> RequestTable:
        """Returns the block table of these requests, see `StepTables`."""
        return self._tables.of(request_ids, changed)

    def stats(self) -> PoolStats:
        """Returns the statistics of this pool and of those that it replaced."""
        now, past = self.pool.stats(), self._past
        if past is None:
            return now
        sums = {name: getattr(now, name) + getattr(past, name) for name in _SUMS.split()}
        most = {name: max(getattr(now, name), getattr(past, name)) for name in _MAXIMA.split()}
        return replace(now, **sums, **most)

    def figures(self) -> dict[str, float]:
        """Returns copies, moves and spread of the blocks, for the report."""
        stats = self.stats()
        moved = self.defragmenter.totals if self.defragmenter is not None else None
        return {
            "evictions": stats.evictions,
            "peak_used": stats.peak_used,
            "range_high_water": stats.high_water,
            **{f"defrag_{name}": n for name, n in (asdict(moved) if moved else {}).items()},
        }

    def states(self) -> dict[str, object]:
        """Returns sizes of the slots for states and counts of snapshots, for the report; empty
        without states.
        """
        size, pool = self._executor.sizing.states, self.pool
        if size is None or not isinstance(pool, HybridPool):
            return {}
        figures = {**asdict(size), "slots": size.slots, "bytes": size.bytes}
        return {**figures, "stored": pool.states.num_snapshots, **pool.states.counts}

    def _stats_if_whole(self) -> PoolStats | None:
        try:
            return self.stats()
        except Exception:  # the exception left a broken pool: its counts are lost
            return self._past

    def _renew(self, pool: BlockPool, past: PoolStats | None) -> None:
        running = min(self._config.max_seqs, pool.num_blocks - 1)  # each owns a block
        if self._config.speculate:  # a step reads tables in place if they have its rows of padding
            buckets = self._executor.sizing.buckets
            running = max(running, *(bucket["requests"] for bucket in buckets))
        tables = StepTables(pool, running, self._executor.sizing.table_width)
        defragmenter = self._new_defragmenter(pool)
        if defragmenter is not None and self.defragmenter is not None:
            defragmenter.totals = self.defragmenter.totals
        before = getattr(self, "pool", None)
        if isinstance(pool, HybridPool) and isinstance(before, HybridPool):
            pool.states.counts.update(before.states.counts)
        self._past, self.pool, self._tables, self.defragmenter = past, pool, tables, defragmenter

    def _new_pool(self) -> BlockPool:
        sizing = self._executor.sizing
        key, sizes = self._config.prefix_key, (sizing.num_blocks, sizing.block_size)
        if (states := sizing.states) is not None:
            every = states.snapshot_every
            slots = {"running": states.running, "snapshots": states.snapshots}
            return HybridPool(*sizes, key=key, **slots, snapshot_every=every)
        if sizing.near_window is None or sizing.near_blocks is None:
            return BlockPool(*sizes, key=key, window=sizing.window)
        return GroupedPool(
            *sizes,
            key=key,
            near_window=sizing.near_window,
            num_near=sizing.near_blocks,
            near_of=self._executor.near_of,
        )

    def _new_defragmenter(self, pool: BlockPool) -> OnlineDefragmenter | None:
        waste = self._config.defrag_waste
        if waste is None and self._executor.sizing.layout.reads_range:
            waste = 0.25
        if waste is None or waste == 1:
            return None
        return OnlineDefragmenter(
            pool,
            self._executor.copies,
            max_waste=waste,
            min_gap=1 if waste == 0 else 8,
            max_blocks=COPIES,
        )
