"""Any sequence of calls to the pool, against a naive model of it and of the memory it manages.

Every slot of the modelled cache holds a payload: the salt and the token history up to there. A
freshly allocated block is poisoned, so is what a move left behind. What a table declares computed
must show exactly the payload of its own tokens at the place where its block lies, whoever wrote it
and however often it was moved. The model predicts every block id that the pool hands out.
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

from compiled_attn.cache.blocks import BlockPool, DuplicateRequest, OutOfBlocks, UnknownRequest
from tests.compiled_attn.state import state_of

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
    withdrawn: bool = False

    def payload(self, position: int) -> Payload:
        return (self.salt, tuple(self.tokens[: position + 1]))


class ModelledPool:
    """Does everything twice, with the pool and with lists, and compares."""

    def __init__(self, num_blocks: int, size: int, least: int | None = None) -> None:
        partial = least is not None
        self.pool = BlockPool(num_blocks, size, partial_hits=partial, min_partial_tokens=least)
        self.size = size
        self.least = least
        self.total = num_blocks - 1
        self.rows: dict[str, Row] = {}
        self.idle: list[int] = []  # cached blocks, next to be evicted first
        self.index: dict[Payload, int] = {}  # payload of a full block's last slot -> block
        self.tails: dict[Payload, int] = {}  # payload of the last slot of a part -> block
        self.twins: dict[int, Payload] = {}  # blocks whose payload is found in another
        self.pending: dict[int, int] = {}  # destination -> source
        self.at = list(range(num_blocks))  # the place of each block
        self.cache: list[list[Payload | None]] = [[None] * size for _ in range(num_blocks)]
        self.withdrawn: set[Payload] = set()  # full blocks that were known before
        self.counts: Counter[str] = Counter()
        self.highest = self.peak = 0

    # The model

    def references(self) -> Counter[int]:
        held = Counter(block for row in self.rows.values() for block in row.blocks)
        return held + Counter(self.pending.values())

    def room(self) -> int:
        return self.total - len(self.references())

    def free_blocks(self) -> list[int]:
        refs = self.references()
        free = [b for b in range(1, self.total + 1) if not refs[b] and b not in self.idle]
        return sorted(free, key=self.at.__getitem__)

    def known(self) -> set[int]:
        return {*self.index.values(), *self.tails.values()}

    def evict(self, block: int) -> None:
        self.counts["evictions"] += 1
        self.forget(block)

    def forget(self, block: int) -> None:
        """A twin is found from now on."""
        self.tails = {key: other for key, other in self.tails.items() if other != block}
        for key in [key for key, other in self.index.items() if other == block]:
            del self.index[key]
            heir = next((b for b, content in self.twins.items() if content == key), None)
            if heir is not None:
                self.index[key] = heir
                del self.twins[heir]
                self.counts["heirs"] += 1

    def take(self, count: int) -> list[int]:
        """The ids that the next allocations must return: lowest free place, then evicted."""
        free = self.free_blocks()[:count]
        evicted = [self.idle.pop(0) for _ in range(count - len(free))]
        for block in evicted:
            self.evict(block)
        for block in free + evicted:
            self.cache[self.at[block]] = [None] * self.size
        self.counts["allocations"] += count
        return free + evicted

    def writes_into_shared(self, row: Row) -> bool:
        if row.length % self.size == 0:
            return False
        return sum(row.blocks[-1] in other.blocks for other in self.rows.values()) > 1

    def can_take_over(self, row: Row) -> bool:
        refs = self.references()
        last = row.blocks[-1] if row.blocks else 0
        return last in self.pending and refs[last] == refs[self.pending[last]] == 1

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

    def partial_hits(self, salt: str | None, tokens: list[int], start: int) -> tuple[int, set[int]]:
        """The most tokens from ``start`` on that a block begins with, and all such blocks."""
        best: dict[int, int] = {}
        for (other, content), block in [*self.index.items(), *self.tails.items()]:
            if (
                other == salt
                and start < len(content) <= start + self.size
                and content[:start] == tuple(tokens[:start])
            ):
                pairs = zip(content[start:], tokens[start:-1], strict=False)
                best[block] = [*(a == b for a, b in pairs), False].index(False)
        most = max(best.values(), default=0)
        return most, {block for block, count in best.items() if count == most}

    def let_go(self, blocks: list[int]) -> None:
        """What becomes of blocks that nobody holds any more, in the order they were given last."""
        refs = self.references()
        for block in reversed(dict.fromkeys(b for b in reversed(blocks) if not refs[b])):
            if block in self.known():
                self.idle.append(block)
            elif block in self.twins:
                found = self.index[self.twins.pop(block)]
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
        elif needed > self.room():
            replaced = [self.pending.pop(row.blocks[-1])]
            if replaced[0] in self.known():
                self.evict(replaced[0])
            self.counts["taken over"] += 1
        if replaced:
            row.blocks[-1] = replaced[0]
        fresh = self.take(needed)
        row.blocks += fresh
        row.length = max(row.length, length)
        row.tokens += [token] * (length - len(row.tokens))
        return replaced + fresh

    def drop(self, name: str) -> Row:
        row = self.rows.pop(name)
        blocks = list(row.blocks)
        # The pool lets go of block after block, from the last one on.
        ghost = self.rows[name] = Row(row.salt, [], blocks)
        while blocks:
            block = ghost.blocks.pop()
            if not self.references()[block]:
                source = self.pending.pop(block, None)
                self.let_go([block] if source is None else [source, block])
        del self.rows[name]
        return row

    def note_use(self) -> None:
        used = self.references()
        self.highest = max([self.highest, *(self.at[block] for block in used)])
        self.peak = max(self.peak, len(used))

    # The operations, on both

    def add(self, name: str, tokens: list[int], salt: str | None) -> None:
        lengths = [len(tokens), len(tokens) + 1, self.total * self.size]
        fits = [self.pool.can_allocate(length, tokens, salt=salt) for length in lengths]
        row = Row(salt, list(tokens), self.hits(salt, tokens))
        self.idle = [block for block in self.idle if block not in row.blocks]
        row.length = len(row.blocks) * self.size
        self.rows[name] = row
        self.pool.add(name, np.array(tokens, dtype=np.int32), salt=salt)
        if self.least is not None:
            self.add_partial_hit(name, row)
        row.computed = row.cached = row.length
        self.counts["queried"] += len(tokens)
        self.counts["hits"] += row.cached
        assert [self.pool.can_reserve(name, length) for length in lengths] == fits
        self.note_use()

    def add_partial_hit(self, name: str, row: Row) -> None:
        """Of several blocks that are equally good the pool may choose."""
        count, sources = self.partial_hits(row.salt, row.tokens, row.length)
        held = self.references()
        has_room = [self.room() > (not held[source]) for source in sources]
        if count < self.least:
            return
        if self.pool.table(name).length == row.length:
            assert not all(has_room)
            self.counts["no room for a copy"] += 1
            return
        source = self.pool._blocks.copies.source(self.pool.table(name).blocks[-1])
        assert source in sources and self.room() > (not held[source])
        if source in self.idle:
            self.idle.remove(source)
        self.pending[(fresh := self.take_beside(source))] = source
        row.blocks.append(fresh)
        row.length += count
        self.counts["copies"] += 1
        self.counts["partial hits"] += count

    def take_beside(self, source: int) -> int:
        self.pending[-1] = source  # holds it
        fresh = self.take(1)[0]
        del self.pending[-1]
        return fresh

    def swap(self, limit: int, skipped: int) -> None:
        """One defragmentation: content first, then the places; a move where that is enough."""
        pairs = self.pool.places.compaction(limit)[skipped:]
        used = {self.at[block] for block in self.references()}
        assert all(a in used and b not in used and a > b > 0 for a, b in pairs)
        for a, b in pairs:
            if self.pool.places.is_worth_keeping(b):
                self.cache[a], self.cache[b] = self.cache[b], self.cache[a]
            else:
                self.cache[a], self.cache[b] = [None] * self.size, self.cache[a]
        self.commit_swap(pairs)

    def shuffle(self, pick: int) -> None:
        """Two places of any state."""
        a, b = pick % self.total + 1, pick // self.total % self.total + 1
        if a != b:
            self.cache[a], self.cache[b] = self.cache[b], self.cache[a]
            self.commit_swap([(a, b)])

    def commit_swap(self, pairs: list[tuple[int, int]]) -> None:
        self.pool.places.swap(pairs)
        for a, b in pairs:
            x, y = self.at.index(a), self.at.index(b)
            self.at[x], self.at[y] = b, a
            self.counts["moves"] += 1
        self.note_use()

    def ask_for_room(self, tokens: list[int], salt: str | None, length: int) -> None:
        hits = self.hits(salt, tokens)
        room = self.total - len(self.references().keys() | set(hits))
        expected = -(-length // self.size) - len(hits) <= room
        assert self.pool.can_allocate(length, tokens, salt=salt) == expected

    def reserve(self, name: str, length: int, token: int) -> None:
        row = self.rows[name]
        needed = self.needed(row, length)
        fits = needed <= self.room() + self.can_take_over(row)
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

    def fill(self, name: str, token: int) -> None:
        """Reserve all that is left, to the last block."""
        row = self.rows[name]
        count = len(row.blocks) + self.room() + self.can_take_over(row)
        self.reserve(name, (count - self.writes_into_shared(row)) * self.size, token)

    def reserving(self, name: str, length: int) -> Callable[[], list[int]]:
        return lambda: self.pool.reserve(name, length)

    def copy(self, skipped: int = 0) -> None:
        """All copies but the first so many, which stay pending."""
        pairs = self.pool.pending_copies()
        assert pairs == [(source, destination) for destination, source in self.pending.items()]
        assert not {source for source, _ in pairs} & {destination for _, destination in pairs}
        for source, destination in pairs[skipped:]:
            self.cache[self.at[destination]] = list(self.cache[self.at[source]])
            del self.pending[destination]
        if skipped:
            self.pool.copied([*pairs[skipped:], *pairs[skipped:]])
            self.counts["copied in parts"] += len(pairs) > skipped
        else:
            assert self.pool.pop_copies() == pairs
        self.let_go([source for source, _ in pairs[skipped:]])

    def step(self, name: str, share: float) -> None:
        """One step of the engine for one request: copy, write K/V, commit."""
        row = self.rows[name]
        start, end = row.computed, row.computed + round(share * (row.length - row.computed))
        self.copy()
        for position in range(start, end):
            place = self.at[row.blocks[position // self.size]]
            self.cache[place][position % self.size] = row.payload(position)
        row.computed = end
        self.pool.commit(name, row.tokens, end)
        if not row.withdrawn:
            self.note(row, start, end)

    def withdraw(self, name: str) -> None:
        row = self.rows[name]
        self.pool.withdraw(name)
        row.withdrawn = True
        for block in row.blocks:
            self.withdrawn |= {key for key, other in self.index.items() if other == block}
            self.forget(block)
            if block in self.twins:
                self.withdrawn.add(self.twins.pop(block))
            self.counts["withdrawn"] += 1

    def note(self, row: Row, start: int, end: int) -> None:
        for number in range(start // self.size, end // self.size):
            self.note_full(row.payload((number + 1) * self.size - 1), row.blocks[number])
        if self.least is not None:
            filled, full = end % self.size, end - end % self.size
            if filled // self.least > max(0, start - full) // self.least:
                self.note_tail(row.payload(end - 1), row.blocks[end // self.size])

    def note_full(self, key: Payload, block: int) -> None:
        self.tails = {other: b for other, b in self.tails.items() if b != block}
        if block in self.index.values() or block in self.twins:
            return
        if key in self.index:
            self.twins[block] = key
        else:
            self.index[key] = block

    def note_tail(self, key: Payload, block: int) -> None:
        if block in self.index.values() or block in self.twins:
            return
        known = [k for k, b in self.tails.items() if b == block]
        if known and known[0][1][: len(key[1])] == key[1]:
            return
        self.tails = {other: b for other, b in self.tails.items() if b != block}
        self.tails.setdefault(key, block)

    def fork(self, parent: str, child: str) -> None:
        row = self.rows[parent]
        tokens = row.tokens[: row.length]
        length, computed, withdrawn = row.length, row.computed, row.withdrawn
        blocks = list(row.blocks)
        self.rows[child] = Row(row.salt, tokens, blocks, length, computed, withdrawn=withdrawn)
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
        """Calls that must fail and change nothing."""
        row, places = self.rows[name], self.pool.places
        before = state_of(self.pool)
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
            lambda: self.pool.withdraw("unknown"),
            lambda: self.pool.free("unknown"),
            lambda: self.pool.preempt("unknown"),
            lambda: places.swap([(1, self.total), (self.total, 1)]),
            lambda: places.swap([(0, self.total)]),
            lambda: places.resolve(-1),
        ):
            with pytest.raises((UnknownRequest, DuplicateRequest, OutOfBlocks, ValueError)):
                wrong()
        assert state_of(self.pool) == before

    # What must always hold

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


PICK = st.integers(0, len(NAMES) - 1)
TOKEN = st.integers(0, 1)
SALT = st.sampled_from([None, None, "x"])


def prompt(common: int, tail: list[int]) -> list[int]:
    """Mostly one common prefix, so that prompts hit each other's blocks."""
    return [0] * common + tail


PROMPT = st.builds(prompt, st.integers(0, 12), st.lists(TOKEN, max_size=3))


class BlockPoolMachine(RuleBasedStateMachine):
    both: ModelledPool

    @initialize(num_blocks=st.integers(2, 16), size=st.integers(1, 4), data=st.data())
    def make(self, num_blocks: int, size: int, data: st.DataObject) -> None:
        shares = [None, *range(1, size)]
        self.both = ModelledPool(num_blocks, size, data.draw(st.sampled_from(shares)))

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
    @rule(pick=PICK, token=TOKEN)
    def fill(self, pick: int, token: int) -> None:
        self.both.fill(self.live(pick), token)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK, share=st.sampled_from([0.5, 1.0]))
    def step(self, pick: int, share: float) -> None:
        self.both.step(self.live(pick), share)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        self.both.withdraw(self.live(pick))

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

    @rule(skipped=st.integers(0, 2))
    def copy(self, skipped: int) -> None:
        self.both.copy(skipped)

    @rule(limit=st.integers(1, 8), skipped=st.integers(0, 2))
    def swap(self, limit: int, skipped: int) -> None:
        self.both.swap(limit, skipped)

    @rule(pick=st.integers(0, 255))
    def shuffle(self, pick: int) -> None:
        self.both.shuffle(pick)

    @precondition(lambda self: self.both.rows)
    @rule(pick=PICK)
    def misuse(self, pick: int) -> None:
        self.both.misuse(self.live(pick))

    @invariant()
    def pool_and_model_agree(self) -> None:
        self.both.check()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)


EVENTS = ["add", "add", "fork", "fork", "append", "append", "append", "reserve"]
EVENTS += ["step", "step", "free", "free", "copy", "misuse", "swap", "shuffle"]


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
            if rng.random() < 0.05:
                both.fill(unused[0], 0)
    elif live and event in ("append", "reserve"):
        name = rng.choice(live)
        more = 1 if event == "append" else rng.randrange(12)
        both.reserve(name, both.rows[name].length + more, rng.randrange(2))
    elif live and event == "step":
        both.step(rng.choice(live), rng.choice((0.5, 1.0)))
        if rng.random() < 0.1:
            both.withdraw(rng.choice(live))
    elif live and event == "free":
        both.free(rng.choice(live), preempt=rng.random() < 0.5)
    elif live and event == "misuse":
        both.misuse(rng.choice(live))
    elif event == "swap":
        both.swap(rng.randrange(1, 9), rng.randrange(3))
    elif event == "shuffle":
        both.shuffle(rng.randrange(256))
    elif event == "copy":
        both.copy(rng.randrange(3))


@pytest.mark.parametrize(("size", "least"), [(1, None), (3, None), (2, 1), (3, 1), (4, 2)])
def test_pool_and_model_agree_over_thousands_of_random_events(size: int, least: int | None) -> None:
    both = ModelledPool(num_blocks=5 + 24 // size, size=size, least=least)
    rng = random.Random(size)
    for _ in range(12_000):
        random_event(both, rng)
        both.check()
    seen = {name for name, count in both.counts.items() if count > 20}
    wanted = {"evictions", "hits", "preemptions", "out of blocks", "moves", "withdrawn"}
    if size > 1:
        wanted |= {"copies"}
    if least is not None:
        wanted |= {"partial hits", "no room for a copy"}
    assert wanted <= seen
    rare = (
        {"heirs", "touched"}
        | ({"copied in parts"} if size > 1 else set())
        | ({"taken over"} if least is not None else set())
    )
    assert rare <= both.counts.keys()
