"""All that must hold between a pool and its model after every call."""

from __future__ import annotations

from tests.compiled_attn.cache.blocks.pool_model import ModelledPool


class CheckedPool(ModelledPool):
    """A modelled pool that compares all that can be seen."""

    def check(self) -> None:
        self.check_tables()
        self.check_payloads()
        self.check_chains()
        self.check_blocks()
        self.check_statistics()

    def check_tables(self) -> None:
        assert self.pool.requests == list(self.rows)
        for name, row in self.rows.items():
            table = self.pool.table(name)
            assert table.blocks == row.blocks == table.array[: len(row.blocks)].tolist()
            assert not table.array[len(row.blocks) :].any()
            assert (table.length, table.num_computed) == (row.length, row.computed)
            assert table.num_cached_tokens == row.cached
            assert len(row.blocks) == -(-row.length // self.size)
            assert 0 not in row.blocks and len(set(row.blocks)) == len(row.blocks)

    def check_payloads(self) -> None:
        for name, row in self.rows.items():
            table = self.pool.table(name)
            for position in range(row.computed):
                block, offset = divmod(table.slot(position), self.size)
                # A block that waits for its copy stands for the source.
                shown = self.cache[self.at[self.pending.get(block, block)]][offset]
                assert shown == row.payload(position)

    def check_chains(self) -> None:
        """Whatever is found is found with all that leads to it: tails were evicted first.

        Unless a fork withdrew a block that another had made findable.
        """
        for salt, content in [*self.index, *self.tails]:
            parent = content[: (len(content) - 1) // self.size * self.size]
            assert not parent or {(salt, parent)} & (self.index.keys() | self.withdrawn)
        assert len(self.pool._index) == len(self.index)
        assert set(self.idle) <= self.known()
        assert list(self.pool._blocks._cached) == self.idle

    def check_blocks(self) -> None:
        refs = self.references()
        places = self.pool.places
        blocks = range(self.total + 1)
        assert places.resolve_all(blocks).tolist() == self.at
        assert [places.unresolve(place) for place in self.at] == list(blocks)
        assert self.pool.refcounts.tolist() == [refs[block] for block in range(self.total + 1)]
        stats = self.pool.stats()
        assert (stats.used, stats.cached) == (len(refs), len(self.idle))
        assert stats.free == len(self.free_blocks())
        assert stats.used + stats.free + stats.cached == stats.total == self.total
        assert self.pool.available == self.total - len(refs)
        highest = max((self.at[block] for block in refs), default=0)
        assert stats.highest_used == self.pool.highest_used == highest
        assert (stats.high_water, stats.peak_used) == (self.highest, self.peak)

    def check_statistics(self) -> None:
        stats, counts = self.pool.stats(), self.counts
        assert stats.requests == len(self.rows)
        assert (stats.queried_tokens, stats.hit_tokens) == (counts["queried"], counts["hits"])
        assert stats.partial_hit_tokens == counts["partial hits"]
        assert (stats.allocations, stats.evictions) == (counts["allocations"], counts["evictions"])
        assert (stats.copies, stats.preemptions) == (counts["copies"], counts["preemptions"])
        ends = {row.blocks[-1]: -row.length % self.size for row in self.rows.values() if row.blocks}
        assert stats.fragmented_slots == sum(ends.values())
