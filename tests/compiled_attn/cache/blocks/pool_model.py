"""A naive model of a block pool and of the memory it manages, and all that both must agree on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from compiled_attn.cache.blocks import BlockPool, DuplicateRequest, OutOfBlocks, UnknownRequest
from tests.compiled_attn.cache.blocks.pools import perform_copies
from tests.compiled_attn.state import state_of

Payload = tuple[str | None, tuple[int, ...]]

NAMES = "abcdef"


@dataclass
class Row:
    """A request of the model. ``tokens`` covers all reserved positions."""

    salt: str | None
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    computed: int = 0
    cached: int = 0
    withdrawn: bool = False
    contents: list[Payload | None] = field(default_factory=list)  # of released blocks

    @property
    def released(self) -> int:
        return len(self.contents)

    @property
    def held(self) -> list[int]:
        return self.blocks[self.released :]

    def payload(self, position: int) -> Payload:
        return (self.salt, tuple(self.tokens[: position + 1]))


class ModelledPool:
    """Calls the pool and a model made of lists, and compares them."""

    def __init__(self, num_blocks: int, size: int, window: int | None = None) -> None:
        self.pool = BlockPool(num_blocks, size, window=window)
        self.size = size
        self.window = window
        self.total = num_blocks - 1
        self.rows: dict[str, Row] = {}
        self.idle: list[int] = []  # cached blocks, next to be evicted first
        self.index: dict[Payload, int] = {}  # payload of a full block's last slot -> block
        self.duplicates: dict[int, Payload] = {}  # blocks whose payload is found in another
        self.pending: dict[int, int] = {}  # destination -> source
        self.cache: list[list[Payload | None]] = [[None] * size for _ in range(num_blocks)]
        self.withdrawn: set[Payload] = set()  # full blocks that were known before
        self.counts: Counter[str] = Counter()
        self.highest = self.peak = 0

    def references(self) -> Counter[int]:
        held = Counter(block for row in self.rows.values() for block in row.held)
        return held + Counter(self.pending.values())

    def room(self) -> int:
        return self.total - len(self.references())

    def free_blocks(self) -> list[int]:
        refs = self.references()
        return [b for b in range(1, self.total + 1) if not refs[b] and b not in self.idle]

    def forget(self, block: int) -> None:
        """A duplicate is found from now on."""
        for key in [key for key, other in self.index.items() if other == block]:
            del self.index[key]
            heir = next((b for b, content in self.duplicates.items() if content == key), None)
            if heir is not None:
                self.index[key] = heir
                del self.duplicates[heir]
                self.counts["heirs"] += 1

    def take(self, count: int) -> list[int]:
        """The ids that the next allocations must return: lowest free block, then evicted."""
        free = self.free_blocks()[:count]
        evicted = [self.idle.pop(0) for _ in range(count - len(free))]
        self.counts["evictions"] += len(evicted)
        for block in evicted:
            self.forget(block)
        for block in free + evicted:
            self.cache[block] = [None] * self.size
        self.counts["allocations"] += count
        return free + evicted

    def writes_into_shared(self, row: Row) -> bool:
        if row.length % self.size == 0:
            return False
        return sum(row.blocks[-1] in other.blocks for other in self.rows.values()) > 1

    def needed(self, row: Row, length: int) -> int:
        if length <= row.length:
            return 0
        return -(-length // self.size) - len(row.blocks) + self.writes_into_shared(row)

    def hits(self, salt: str | None, tokens: list[int]) -> list[int]:
        blocks = []
        for end in range(self.size, len(tokens), self.size):
            block = self.index.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def let_go(self, blocks: list[int]) -> None:
        """Caches or frees blocks without holders, in the order of their last occurrence."""
        refs = self.references()
        for block in reversed(dict.fromkeys(b for b in reversed(blocks) if not refs[b])):
            if block in self.index.values():
                self.idle.append(block)
            elif block in self.duplicates:
                found = self.index[self.duplicates.pop(block)]
                if found in self.idle:  # its content was used until now
                    self.idle.remove(found)
                    self.idle.append(found)
                    self.counts["touched"] += 1

    def grow(self, row: Row, length: int, token: int) -> list[int]:
        needed = self.needed(row, length)
        replaced = []
        if needed > 0 and self.writes_into_shared(row):
            old = row.blocks[-1]
            replaced = self.take(1)
            self.pending[replaced[0]] = self.pending.get(old, old)
            needed -= 1
            self.counts["copies"] += 1
            row.blocks[-1] = replaced[0]
        fresh = self.take(needed)
        row.blocks += fresh
        row.length = max(row.length, length)
        row.tokens += [token] * (length - len(row.tokens))
        return replaced + fresh

    def drop(self, name: str) -> None:
        row = self.rows.pop(name)
        blocks = list(row.held)
        # The pool lets go of block after block, from the last one on.
        ghost = self.rows[name] = Row(row.salt, [], blocks)
        while blocks:
            block = ghost.blocks.pop()
            if not self.references()[block]:
                source = self.pending.pop(block, None)
                self.let_go([block] if source is None else [source, block])
        del self.rows[name]

    def note_use(self) -> None:
        used = self.references()
        self.highest = max([self.highest, *used])
        self.peak = max(self.peak, len(used))

    def add(self, name: str, tokens: list[int], salt: str | None) -> None:
        lengths = [len(tokens), len(tokens) + 1, self.total * self.size]
        fits = [self.pool.can_allocate(length, tokens, salt=salt) for length in lengths]
        row = Row(salt, list(tokens), self.hits(salt, tokens))
        ends = [(number + 1) * self.size for number in range(row.blocks.count(0))]
        row.contents = [row.payload(end - 1) for end in ends]
        self.counts["hits beyond null blocks"] += row.released > 0
        self.idle = [block for block in self.idle if block not in row.blocks]
        row.length = len(row.blocks) * self.size
        self.rows[name] = row
        self.pool.add(name, np.array(tokens, dtype=np.int32), salt=salt)
        row.computed = row.cached = row.length
        self.counts["queried"] += len(tokens)
        self.counts["hits"] += row.cached
        assert [self.pool.can_reserve(name, length) for length in lengths] == fits
        self.note_use()

    def swap(self, limit: int, skipped: int) -> None:
        """One defragmentation: content first, then the ids; a move where that is enough."""
        pairs = self.pool.compaction(limit)[skipped:]
        used = self.references().keys()
        assert all(a in used and b not in used and a > b > 0 for a, b in pairs)
        for a, b in pairs:
            assert self.pool.has_content(a) and self.pool.has_content(b) == (b in self.idle)
            if b in self.idle:
                self.cache[a], self.cache[b] = self.cache[b], self.cache[a]
            else:
                self.cache[a], self.cache[b] = [None] * self.size, self.cache[a]
        self.commit_swap(pairs)

    def shuffle(self, pick: int) -> None:
        """Exchanges two blocks of any state."""
        a, b = pick % self.total + 1, pick // self.total % self.total + 1
        if a != b:
            self.cache[a], self.cache[b] = self.cache[b], self.cache[a]
            self.commit_swap([(a, b)])

    def commit_swap(self, pairs: list[tuple[int, int]]) -> None:
        tables = {name: self.pool.table(name) for name in self.rows}
        self.pool.exchange(pairs)
        assert all(self.pool.table(name) is table for name, table in tables.items())
        new = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        for row in self.rows.values():
            row.blocks = [new.get(block, block) for block in row.blocks]
        self.idle = [new.get(block, block) for block in self.idle]
        self.index = {key: new.get(block, block) for key, block in self.index.items()}
        self.duplicates = {new.get(block, block): key for block, key in self.duplicates.items()}
        self.pending = {new.get(d, d): new.get(s, s) for d, s in self.pending.items()}
        self.counts["moves"] += len(pairs)
        self.note_use()

    def ask_for_room(self, tokens: list[int], salt: str | None, length: int) -> None:
        hits = self.hits(salt, tokens)
        held = {block for block in hits if block}
        room = self.total - len(self.references().keys() | held)
        needed = -(-length // self.size) - len(hits)
        assert self.pool.can_allocate(length, tokens, salt=salt) == (needed <= room)
        fits = self.pool.can_allocate(length, tokens, salt=salt, at_once=4)
        assert fits == (min(needed, 4 - len(held)) <= room)

    def reserve(self, name: str, length: int, token: int) -> None:
        row = self.rows[name]
        needed = self.needed(row, length)
        fits = needed <= self.room()
        assert self.pool.can_reserve(name, length) == fits
        call = partial(self.pool.reserve, name, length)
        if length == row.length + 1:
            call = partial(self.pool.append, name)
        if fits:
            expected = self.grow(row, length, token)
            assert call() == expected
            self.note_use()
        else:
            self.counts["out of blocks"] += 1
            with pytest.raises(OutOfBlocks):
                call()

    def fill(self, name: str, token: int) -> None:
        """Reserve all that is left, to the last block."""
        row = self.rows[name]
        count = len(row.blocks) + self.room()
        self.reserve(name, (count - self.writes_into_shared(row)) * self.size, token)

    def copy(self, skipped: int = 0) -> None:
        """All copies but the first so many, which stay pending."""
        pairs = self.pool.pending_copies()
        assert pairs == [(source, destination) for destination, source in self.pending.items()]
        assert not {source for source, _ in pairs} & {destination for _, destination in pairs}
        for source, destination in pairs[skipped:]:
            self.cache[destination] = list(self.cache[source])
            del self.pending[destination]
        if skipped:
            self.pool.copied([*pairs[skipped:], *pairs[skipped:]])
            self.counts["copied in parts"] += len(pairs) > skipped
        else:
            assert perform_copies(self.pool) == pairs
        self.let_go([source for source, _ in pairs[skipped:]])

    def step(self, name: str, share: float) -> None:
        """One step of the engine for one request: copy, write K/V, commit."""
        row = self.rows[name]
        start, end = row.computed, row.computed + round(share * (row.length - row.computed))
        self.copy()
        for position in range(start, end):
            assert position // self.size >= row.released
            block = row.blocks[position // self.size]
            self.cache[block][position % self.size] = row.payload(position)
        row.computed = end
        self.pool.commit(name, row.tokens, end)
        if not row.withdrawn:
            self.note(row, start, end)

    def withdraw(self, name: str) -> None:
        row = self.rows[name]
        self.pool.withdraw(name)
        row.withdrawn = True
        for block in [self.index[key] for key in row.contents if key in self.index]:
            self.idle = [each for each in self.idle if each != block]
            self.forget(block)
            self.counts["withdrawn after release"] += 1
        for block in row.held:
            self.withdrawn |= {key for key, other in self.index.items() if other == block}
            self.forget(block)
            if block in self.duplicates:
                self.withdrawn.add(self.duplicates.pop(block))
            self.counts["withdrawn"] += 1

    def note(self, row: Row, start: int, end: int) -> None:
        for number in range(start // self.size, end // self.size):
            key, block = row.payload((number + 1) * self.size - 1), row.blocks[number]
            if block in self.index.values() or block in self.duplicates:
                continue
            if key in self.index:
                self.duplicates[block] = key
            else:
                self.index[key] = block

    def fork(self, parent: str, child: str) -> None:
        row = self.rows[parent]
        tokens = row.tokens[: row.length]
        length, computed, withdrawn = row.length, row.computed, row.withdrawn
        blocks = list(row.blocks)
        contents = [*row.contents]
        self.rows[child] = Row(row.salt, tokens, blocks, length, computed, 0, withdrawn, contents)
        self.pool.fork(parent, child)

    def free(self, name: str, preempt: bool) -> None:
        self.drop(name)
        self.counts["preemptions"] += preempt
        (self.pool.preempt if preempt else self.pool.free)(name)

    def misuse(self, name: str) -> None:
        """Calls that must fail and change nothing."""
        row = self.rows[name]
        before = state_of(self.pool)
        for wrong in (
            lambda: self.pool.add(name, row.tokens),
            lambda: self.pool.fork(name, name),
            lambda: self.pool.fork("unknown", "new"),
            lambda: self.pool.reserve("unknown", 1),
            lambda: self.pool.reserve(name, -1),
            lambda: self.pool.reserve(name, (self.total + 1 + row.released) * self.size),
            lambda: self.pool.commit("unknown", [], 0),
            lambda: self.pool.commit(name, row.tokens, row.length + 1),
            lambda: self.pool.commit(name, row.tokens, row.computed - 1),
            lambda: self.pool.withdraw("unknown"),
            lambda: self.pool.release_before("unknown", 0),
            lambda: self.pool.release_before(name, row.computed + 1),
            lambda: self.pool.free("unknown"),
            lambda: self.pool.preempt("unknown"),
            lambda: self.pool.exchange([(1, self.total), (self.total, 1)]),
            lambda: self.pool.exchange([(0, self.total)]),
        ):
            with pytest.raises((UnknownRequest, DuplicateRequest, OutOfBlocks, ValueError)):
                wrong()
        assert state_of(self.pool) == before

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
            assert table.num_released == row.released and not any(row.blocks[: row.released])
            assert 0 not in row.held and len(set(row.held)) == len(row.held)

    def check_payloads(self) -> None:
        for name, row in self.rows.items():
            table = self.pool.table(name)
            for position in range(row.released * self.size, row.computed):
                block, offset = divmod(table.slot(position), self.size)
                # A block that waits for its copy stands for the source.
                shown = self.cache[self.pending.get(block, block)][offset]
                assert shown == row.payload(position)

    def check_chains(self) -> None:
        """Whatever is found is found with all that leads to it: tails were evicted first.

        Unless a fork withdrew a block that another had indexed.
        """
        for salt, content in self.index if self.window is None else ():
            parent = content[: len(content) - self.size]
            assert not parent or {(salt, parent)} & (self.index.keys() | self.withdrawn)
        assert len(self.pool._index) == len(self.index)
        assert [self.pool._index.block(key) for key in self.pool._blocks._cached] == self.idle

    def check_blocks(self) -> None:
        refs = self.references()
        assert self.pool.refcounts.tolist() == [refs[block] for block in range(self.total + 1)]
        stats = self.pool.stats()
        assert (stats.used, stats.cached) == (len(refs), len(self.idle))
        assert stats.free == len(self.free_blocks())
        assert stats.used + stats.free + stats.cached == stats.total == self.total
        assert self.pool.available == self.total - len(refs)
        assert self.pool.num_used == len(refs)
        assert stats.highest_used == self.pool.highest_used == max(refs, default=0)
        assert (stats.high_water, stats.peak_used) == (self.highest, self.peak)

    def check_statistics(self) -> None:
        stats, counts = self.pool.stats(), self.counts
        assert stats.requests == len(self.rows)
        assert (stats.queried_tokens, stats.hit_tokens) == (counts["queried"], counts["hits"])
        assert (stats.allocations, stats.evictions) == (counts["allocations"], counts["evictions"])
        assert (stats.copies, stats.preemptions) == (counts["copies"], counts["preemptions"])
        ends = {row.blocks[-1]: -row.length % self.size for row in self.rows.values() if row.blocks}
        assert stats.fragmented_slots == sum(ends.values())
