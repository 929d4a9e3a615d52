"""Any sequence of calls to the pool, against a naive model of it and of the memory it manages.

Every slot of the modelled memory holds a payload: the salt and the token history up to there. A
freshly allocated block is poisoned. What a table declares computed must show exactly the payload of
its own tokens, whoever wrote it. The model predicts every block id that the pool hands out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_attn.blocks import BlockPool, DuplicateRequest, OutOfBlocks, UnknownRequest

Payload = tuple[str | None, tuple[int, ...]]

NAMES = "abcdef"


@dataclass
class Row:
    """What the model knows of one request. ``tokens`` covers all reserved positions."""

    salt: str | None
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    computed: int = 0
    cached: int = 0

    def payload(self, position: int) -> Payload:
        return (self.salt, tuple(self.tokens[: position + 1]))


class ModelledPool:
    """Does everything twice, with the pool and with lists, and compares."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.pool = BlockPool(num_blocks, size)
        self.size = size
        self.total = num_blocks - 1
        self.rows: dict[str, Row] = {}
        self.idle: list[int] = []  # cached blocks, next to be evicted first
        self.index: dict[Payload, int] = {}  # payload of a block's last slot -> block
        self.pending: dict[int, int] = {}  # destination -> source
        self.memory: dict[int, list[Payload | None]] = {}
        self.counts: Counter[str] = Counter()
        self.highest = self.peak = 0

    # The model

    def references(self) -> Counter[int]:
        held = Counter(block for row in self.rows.values() for block in row.blocks)
        return held + Counter(self.pending.values())

    def free_blocks(self) -> list[int]:
        refs = self.references()
        return [b for b in range(1, self.total + 1) if not refs[b] and b not in self.idle]

    def take(self, count: int) -> list[int]:
        """The ids that the next allocations must return: lowest free, then evicted."""
        free = self.free_blocks()[:count]
        evicted = [self.idle.pop(0) for _ in range(count - len(free))]
        self.index = {key: block for key, block in self.index.items() if block not in evicted}
        for block in free + evicted:
            self.memory[block] = [None] * self.size
        self.counts["evictions"] += len(evicted)
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
        """Queue what nobody holds any more, in the order given, where its content is known."""
        refs = self.references()
        known = set(self.index.values())
        self.idle += [b for b in dict.fromkeys(blocks) if not refs[b] and b in known]

    def grow(self, row: Row, length: int, token: int) -> list[int]:
        needed = self.needed(row, length)
        copies = needed > 0 and self.writes_into_shared(row)
        added = self.take(needed)
        if copies:
            old = row.blocks[-1]
            self.pending[added[0]] = self.pending.get(old, old)
            row.blocks[-1] = added[0]
            self.counts["copies"] += 1
        row.blocks += added[copies:]
        row.length = max(row.length, length)
        row.tokens += [token] * (length - len(row.tokens))
        return added

    def drop(self, name: str) -> Row:
        row = self.rows.pop(name)
        for block in reversed(row.blocks):
            if not self.references()[block]:
                source = self.pending.pop(block, None)
                self.let_go([block] if source is None else [source, block])
        return row

    def note_use(self) -> None:
        used = self.references()
        self.highest = max([self.highest, *used])
        self.peak = max(self.peak, len(used))

    # The operations, on both

    def add(self, name: str, tokens: list[int], salt: str | None) -> None:
        row = Row(salt, list(tokens), self.hits(salt, tokens))
        self.idle = [block for block in self.idle if block not in row.blocks]
        row.length = row.computed = row.cached = len(row.blocks) * self.size
        self.rows[name] = row
        self.counts["queried"] += len(tokens)
        self.counts["hits"] += row.cached
        self.pool.add(name, np.array(tokens, dtype=np.int32), salt=salt)
        self.note_use()

    def ask_for_room(self, tokens: list[int], salt: str | None, length: int) -> None:
        hits = self.hits(salt, tokens)
        room = self.total - len(self.references().keys() | set(hits))
        expected = -(-length // self.size) - len(hits) <= room
        assert self.pool.can_allocate(length, tokens, salt=salt) == expected

    def reserve(self, name: str, length: int, token: int) -> None:
        row = self.rows[name]
        needed = self.needed(row, length)
        fits = needed <= self.total - len(self.references())
        assert self.pool.blocks_needed(name, length) == needed
        assert self.pool.can_reserve(name, length) == fits
        appends = length == row.length + 1
        call = (lambda: self.pool.append(name)) if appends else self.reserving(name, length)
        if fits:
            expected = self.grow(row, length, token)
            assert call() == expected
            self.note_use()
        else:
            self.counts["out of blocks"] += 1
            with pytest.raises(OutOfBlocks):
                call()

    def reserving(self, name: str, length: int) -> Callable[[], list[int]]:
        return lambda: self.pool.reserve(name, length)

    def copy(self) -> None:
        pairs = self.pool.pop_copies()
        assert pairs == [(source, destination) for destination, source in self.pending.items()]
        assert not {source for source, _ in pairs} & {destination for _, destination in pairs}
        for source, destination in pairs:
            self.memory[destination] = list(self.memory[source])
        self.pending.clear()
        self.let_go([source for source, _ in pairs])

    def step(self, name: str, share: float) -> None:
        """One step of the engine for one request: copy, write K/V, commit."""
        row = self.rows[name]
        end = row.computed + round(share * (row.length - row.computed))
        self.copy()
        for position in range(row.computed, end):
            block = row.blocks[position // self.size]
            self.memory[block][position % self.size] = row.payload(position)
        # Only what became full now: a block whose key was taken then stays without one.
        full = range(row.computed // self.size, end // self.size)
        row.computed = end
        for number in full:
            key, block = row.payload((number + 1) * self.size - 1), row.blocks[number]
            if block not in self.index.values():
                self.index.setdefault(key, block)
        self.pool.commit(name, row.tokens, end)

    def fork(self, parent: str, child: str) -> None:
        row = self.rows[parent]
        tokens = row.tokens[: row.length]
        self.rows[child] = Row(row.salt, tokens, list(row.blocks), row.length, row.computed)
        self.pool.fork(parent, child)

    def free(self, name: str, preempt: bool) -> Row:
        row = self.drop(name)
        self.counts["preemptions"] += preempt
        if preempt:
            self.pool.preempt(name)
        else:
            self.pool.free(name)
        return row

    def misuse(self, name: str) -> None:
        """Calls that must fail; that nothing changed is what the checks say afterwards."""
        row = self.rows[name]
        for wrong in (
            lambda: self.pool.add(name, row.tokens),
            lambda: self.pool.fork(name, name),
            lambda: self.pool.fork("unknown", "new"),
            lambda: self.pool.reserve("unknown", 1),
            lambda: self.pool.reserve(name, -1),
            lambda: self.pool.reserve(name, (self.total + 1) * self.size),
            lambda: self.pool.commit("unknown", [], 0),
            lambda: self.pool.commit(name, row.tokens, row.length + 1),
            lambda: self.pool.commit(name, row.tokens, row.computed - 1),
            lambda: self.pool.free("unknown"),
            lambda: self.pool.preempt("unknown"),
        ):
            with pytest.raises((UnknownRequest, DuplicateRequest, OutOfBlocks, ValueError)):
                wrong()

    # What must always hold

    def check(self) -> None:
        self.check_tables()
        self.check_payloads()
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
                shown = self.memory[self.pending.get(block, block)][offset]
                assert shown == row.payload(position)

    def check_blocks(self) -> None:
        refs = self.references()
        assert self.pool.refcounts.tolist() == [refs[block] for block in range(self.total + 1)]
        stats = self.pool.stats()
        assert (stats.used, stats.cached) == (len(refs), len(self.idle))
        assert stats.free == len(self.free_blocks())
        assert stats.used + stats.free + stats.cached == stats.total == self.total
        assert self.pool.available == self.total - len(refs)
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


PICK = st.integers(0, len(NAMES) - 1)
TOKEN = st.integers(0, 1)
SALT = st.sampled_from([None, None, "x"])


def prompt(common: int, tail: list[int]) -> list[int]:
    """Mostly one common prefix, so that prompts hit each other's blocks."""
    return [0] * common + tail


PROMPT = st.builds(prompt, st.integers(0, 12), st.lists(TOKEN, max_size=3))


class BlockPoolMachine(RuleBasedStateMachine):
    both: ModelledPool

    @initialize(num_blocks=st.integers(2, 16), size=st.integers(1, 4))
    def make(self, num_blocks: int, size: int) -> None:
        self.both = ModelledPool(num_blocks, size)

    def live(self, pick: int) -> str:
        return list(self.both.rows)[pick % len(self.both.rows)]

    def unused(self, pick: int) -> str:
        names = [name for name in NAMES if name not in self.both.rows]
        return names[pick % len(names)]

    @precondition(lambda self: len(self.both.rows) < len(NAMES))
    @rule(pick=PICK, tokens=PROMPT, salt=SALT, run=st.booleans())
    def add(self, pick: int, tokens: list[int], salt: str | None, run: bool) -> None:
        name = self.unused(pick)
        self.both.add(name, tokens, salt)
        if run:
            self.both.reserve(name, len(tokens), 0)
            self.both.step(name, 1.0)

    @rule(tokens=PROMPT, salt=SALT, length=st.integers(0, 40))
    def ask_for_room(self, tokens: list[int], salt: str | None, length: int) -> None:
        self.both.ask_for_room(tokens, salt, length)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, more=st.integers(-3, 14), token=TOKEN)
    def reserve(self, pick: int, more: int, token: int) -> None:
        name = self.live(pick)
        self.both.reserve(name, max(0, self.both.rows[name].length + more), token)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, token=TOKEN)
    def append(self, pick: int, token: int) -> None:
        name = self.live(pick)
        self.both.reserve(name, self.both.rows[name].length + 1, token)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, share=st.sampled_from([0.5, 1.0]))
    def step(self, pick: int, share: float) -> None:
        self.both.step(self.live(pick), share)

    @precondition(lambda self: 0 < len(self.both.rows) < len(NAMES))
    @rule(pick=PICK, child=PICK)
    def fork(self, pick: int, child: int) -> None:
        self.both.fork(self.live(pick), self.unused(child))

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, preempt=st.booleans(), again=st.booleans())
    def free(self, pick: int, preempt: bool, again: bool) -> None:
        name = self.live(pick)
        row = self.both.free(name, preempt)
        if again:
            self.both.add(name, row.tokens, row.salt)

    @rule()
    def copy(self) -> None:
        self.both.copy()

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK)
    def misuse(self, pick: int) -> None:
        self.both.misuse(self.live(pick))

    @invariant()
    def pool_and_model_agree(self) -> None:
        self.both.check()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


EVENTS = ["add", "add", "fork", "fork", "append", "append", "append", "reserve"]
EVENTS += ["step", "step", "free", "free", "copy", "misuse"]


def random_event(both: ModelledPool, rng: random.Random) -> None:
    """One event of a crowded server: mostly appends and steps, often short of blocks."""
    live, unused = list(both.rows), [name for name in NAMES if name not in both.rows]
    event = rng.choice(EVENTS)
    if event in ("add", "fork") and unused:
        if event == "fork" and live:
            both.fork(rng.choice(live), unused[0])
        else:
            tail = rng.choices((0, 1), k=rng.randrange(4))
            both.add(unused[0], prompt(rng.randrange(13), tail), rng.choice((None, None, "x")))
    elif live and event in ("append", "reserve"):
        name = rng.choice(live)
        more = 1 if event == "append" else rng.randrange(12)
        both.reserve(name, both.rows[name].length + more, rng.randrange(2))
    elif live and event == "step":
        both.step(rng.choice(live), rng.choice((0.5, 1.0)))
    elif live and event == "free":
        both.free(rng.choice(live), preempt=rng.random() < 0.5)
    elif live and event == "misuse":
        both.misuse(rng.choice(live))
    elif event == "copy":
        both.copy()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_pool_and_model_agree_over_thousands_of_random_events(size: int) -> None:
    both = ModelledPool(num_blocks=5 + 24 // size, size=size)
    rng = random.Random(size)
    for _ in range(10_000):
        random_event(both, rng)
        both.check()
    seen = {name for name, count in both.counts.items() if count > 20}
    wanted = {"evictions", "hits", "preemptions", "out of blocks"} | (
        {"copies"} if size > 1 else set()
    )
    assert wanted <= seen
