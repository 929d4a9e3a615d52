"""A pool of requests with recurrent states, against a dict of what is in each slot.

A step writes to the slot of each request for which tokens its states are, as a kernel would; what a
request continues from must be its own tokens, whoever computed them and however often they were
copied.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_attn.cache.blocks import DuplicateRequest, OutOfBlocks, UnknownRequest
from compiled_attn.cache.blocks.hybrid import HybridPool, StatePool
from compiled_attn.cache.blocks.pool import BlockPool

SIZE = 2
NAMES = "abcd"
Payload = tuple[str | None, tuple[int, ...]]


@dataclass
class Row:
    """A request of the model; ``saved``: tokens of its last snapshot."""

    salt: str | None
    tokens: list[int]
    computed: int = 0
    saved: int = 0
    is_withdrawn: bool = False

    def payload(self, length: int) -> Payload:
        return self.salt, tuple(self.tokens[:length])


@dataclass
class Model:
    """Contents of slots, and which snapshots there are, the least recently used one first."""

    snapshots: int
    slots: dict[int, Payload | None] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    stored: OrderedDict[Payload, bool] = field(default_factory=OrderedDict)  # whether it is pinned
    withdrawn: int = 0  # slots of snapshots that are not found, until the copies ran

    def save(self, payload: Payload) -> None:
        if payload in self.stored:
            self.stored.move_to_end(payload)
            return
        if len(self.stored) + self.withdrawn >= self.snapshots:
            oldest = next((each for each, pinned in self.stored.items() if not pinned), None)
            if oldest is None:
                return
            del self.stored[oldest]
        self.stored[payload] = True

    def withdraw(self, payload: Payload) -> None:
        self.withdrawn += self.stored.pop(payload, False)


class HybridMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(8, 30),
        running=st.integers(1, 4),
        snapshots=st.integers(0, 5),
        every=st.sampled_from([1, 1, 2, 3]),
    )
    def start(self, blocks: int, running: int, snapshots: int, every: int) -> None:
        self.pool = HybridPool(
            blocks, SIZE, running=running, snapshots=snapshots, snapshot_every=every, key=b"test"
        )
        self.border, self.model = every * SIZE, Model(snapshots)
        self.pinned: dict[str, Payload] = {}  # what requests wait to continue from

    @property
    def rows(self) -> dict[str, Row]:
        return self.model.rows

    @rule(
        name=st.sampled_from(NAMES),
        common=st.integers(0, 12),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=2),
        kind=st.sampled_from([*5 * ["plain"], "salted", "scored", "aborted", "aborted"]),
    )
    def add(self, name: str, common: int, tail: list[int], kind: str) -> None:
        """Adds a request, which may be gone again before the pending copies run."""
        salt, looks_up = "x" if kind == "salted" else None, kind != "scored"
        row = Row(salt, [0] * common + tail)
        if name in self.rows:
            with pytest.raises(DuplicateRequest):
                self.pool.add(name, row.tokens)
            return
        if len(self.rows) == self.pool.states.max_running:
            assert not self.pool.can_allocate(1, row.tokens, salt=salt)
            with pytest.raises(RuntimeError, match="expected a free slot"):
                self.pool.add(name, row.tokens, salt=salt)
            return
        prompt = self.pool.prompt(row.tokens, salt=salt) if looks_up else None
        blocks = BlockPool._match(self.pool, prompt)[0] if prompt else []
        lengths = (count * SIZE for count in range(len(blocks), 0, -1))
        found = next((n for n in lengths if row.payload(n) in self.model.stored), 0)
        if fits := self.pool.can_allocate(len(row.tokens), prompt, salt=salt):
            assert self.pool.states.has_free
        table = self.pool.add(name, prompt, salt=salt)
        assert table.num_cached_tokens == table.num_computed == found
        row.computed = row.saved = found
        if found:
            self.model.stored[row.payload(found)] = True
            self.model.stored.move_to_end(row.payload(found))
            self.pinned[name] = row.payload(found)
        self.rows[name] = row
        if fits:
            self.pool.reserve(name, len(row.tokens))
        if kind == "aborted":
            self.remove(name, "free")

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), room=st.integers(1, 12))
    def step_some(self, data: st.DataObject, room: int) -> None:
        self.step(data.draw(st.lists(st.sampled_from([*self.rows]), min_size=1, unique=True)), room)

    @precondition(lambda self: self.rows)
    @rule(times=st.integers(1, 5), room=st.integers(1, 12), token=st.sampled_from([0, 0, 1]))
    def step_all(self, times: int, room: int, token: int) -> None:
        for _ in range(times):
            self.step([*self.rows], room, token)

    def step(self, names: list[str], room: int, token: int = 0) -> None:
        """Requests compute some of their tokens, which are then committed."""
        chunks: dict[str, tuple[int, int]] = {}
        for name in names:
            row, rest = self.rows[name], len(self.rows[name].tokens) - self.rows[name].computed
            if rest < 1:
                row.tokens.append(token)
                rest = 1
            end = row.computed + min(rest, room)
            end = self.pool.chunk_end(row.computed, end, is_last=end == len(row.tokens))
            assert row.computed < end <= row.computed + min(rest, room)
            if self.pool.try_reserve(name, end):
                chunks[name] = row.computed, end
            else:
                with pytest.raises(OutOfBlocks):
                    self.pool.reserve(name, end)
        self.settle()
        slots = [self.pool.states.slot(name) for name in chunks]
        starts = [start for start, _ in chunks.values()]
        counts = [end - start for start, end in chunks.values()]
        self.pool.states.advance(chunks, slots, starts, counts)
        for (name, (start, end)), slot in zip(chunks.items(), slots, strict=True):
            if start:  # a kernel reads the slot
                assert self.model.slots[slot] == self.rows[name].payload(start)
            self.model.slots[slot] = self.rows[name].payload(end)
        for name, (_, end) in chunks.items():
            row = self.rows[name]
            self.pool.commit(name, row.tokens, end)
            row.computed = end
            if row.is_withdrawn or end % SIZE or end // self.border <= row.saved // self.border:
                continue
            row.saved = end
            self.model.save(row.payload(end))

    def settle(self) -> None:
        for source, destination in self.pool.states.pending():
            self.model.slots[destination] = self.model.slots.get(source)
        self.pool.states.copied()
        self.model.stored = OrderedDict.fromkeys(self.model.stored, False)
        self.model.withdrawn = 0
        self.pinned.clear()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), how=st.sampled_from(["free", "preempt", "withdraw"]))
    def change(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from([*self.rows]))
        row = self.rows[name]
        if how == "withdraw":
            keys = map(self.pool._index.key, self.pool.table(name).blocks)
            for number, key in enumerate(keys, 1):
                if key is not None:
                    self.model.withdraw(row.payload(number * SIZE))
            self.pool.withdraw(name)
            row.is_withdrawn = True
        else:
            self.remove(name, how)

    def remove(self, name: str, how: str) -> None:
        getattr(self.pool, how)(name)
        del self.rows[name]
        with pytest.raises(UnknownRequest):
            self.pool.free(name)
        source = self.pinned.pop(name, None)
        if source is not None and source not in self.pinned.values():
            self.unpin(source)

    def unpin(self, payload: Payload) -> None:
        """A request that waited to continue from a snapshot is gone."""
        states = self.pool.states
        saved = {slot for _, slot in states._saves}
        if payload in self.model.stored:
            key = self.pool._index.root(payload[0])
            for start in range(0, len(payload[1]), SIZE):
                key = self.pool._index.next_key(key, payload[1], start)
            self.model.stored[payload] = states._snapshots[key] in saved
        else:
            self.model.withdrawn = len(states._withdrawn)

    @rule(a=st.integers(1, 19), b=st.integers(1, 19))
    def exchange(self, a: int, b: int) -> None:
        if a != b and max(a, b) < self.pool.num_blocks:
            before = {name: self.pool.states.slot(name) for name in self.rows}
            self.pool.exchange([(a, b)])
            assert {name: self.pool.states.slot(name) for name in self.rows} == before

    @invariant()
    def no_slot_has_two_owners_and_none_is_lost(self) -> None:
        if not hasattr(self, "pool"):
            return
        states = self.pool.states
        running = [states.slot(name) for name in self.rows]
        owned = [*running, *states._snapshots.values(), *states._withdrawn, *states._free]
        assert sorted(owned) == [*range(1, states.num_slots)]
        assert len(states._snapshots) == states.num_snapshots == len(self.model.stored)
        assert len(states._withdrawn) == self.model.withdrawn
        assert states.num_snapshots + self.model.withdrawn <= self.model.snapshots
        assert [bool(states._pins[slot]) for slot in states._snapshots.values()] == [
            *self.model.stored.values()
        ]
        for name, row in self.rows.items():
            assert states.positions[states.slot(name)] == row.computed

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.settle()
        for name in [*self.rows]:
            self.pool.free(name)
        states = self.pool.states
        assert not states._pins and not states.pending() and not self.pool.num_used
        assert len(states._free) == states.num_slots - 1 - states.num_snapshots


HybridMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestHybridMachine = HybridMachine.TestCase


def hybrid(blocks: int = 30, *, running: int = 3, snapshots: int = 2, every: int = 2) -> HybridPool:
    return HybridPool(
        blocks, SIZE, running=running, snapshots=snapshots, snapshot_every=every, key=b"test"
    )


def compute(pool: HybridPool, name: str, tokens: list[int], end: int) -> list[tuple[int, int]]:
    """Computes a request up to a length; returns the copies before the step."""
    table, copies = pool.table(name), pool.states.pending()
    pool.states.copied()
    start = table.num_computed
    pool.reserve(name, end)
    pool.states.advance([name], [pool.states.slot(name)], [start], [end - start])
    pool.commit(name, tokens, end)
    return copies


def test_a_prefix_is_found_up_to_its_last_snapshot():
    pool, tokens = hybrid(), [*range(20)]
    pool.add("a", tokens)
    compute(pool, "a", tokens, 4)
    assert compute(pool, "a", tokens, 7) == [(1, 2)]
    compute(pool, "a", tokens, 8)
    pool.free("a")
    table = pool.add("b", tokens)
    assert table.num_cached_tokens == 8 and table.length == 8
    assert pool.states.pending()[-1][1] == pool.states.slot("b")
    assert pool.add("c", tokens[:8]).num_cached_tokens == 4  # its last token is computed
    assert pool.add("d", tokens[:6] + [9] * 9).num_cached_tokens == 4
    assert pool.stats().hit_tokens == 16


def test_a_hit_without_blocks_or_without_a_snapshot_is_none():
    pool, tokens = hybrid(snapshots=0), [*range(20)]
    pool.add("a", tokens)
    compute(pool, "a", tokens, 12)
    assert pool.add("b", tokens).num_cached_tokens == 0 and not pool.states.pending()
    pool = hybrid(7, every=1)
    pool.add("a", tokens)
    compute(pool, "a", tokens, 10)
    pool.free("a")
    pool.add("b", [50] * 12)
    compute(pool, "b", [50] * 12, 12)  # takes the blocks, while the snapshot stays
    pool.free("b")
    assert pool.states.num_snapshots == 2
    assert pool.add("c", tokens).num_cached_tokens == 0


def test_a_snapshot_that_a_request_waits_for_is_not_evicted():
    pool, tokens = hybrid(snapshots=1, every=1), [*range(20)]
    pool.add("a", tokens)
    compute(pool, "a", tokens, 2)
    pool.states.copied()
    assert pool.add("b", tokens).num_cached_tokens == 2
    assert not pool.states.save("a", b"other")
    assert pool.states.num_snapshots == 1
    pool.free("b")  # before its first step
    assert not pool.states.pending() and pool.states.save("a", b"other")
    assert pool.states.counts == {"saved": 1, "evicted": 1, "restored": 0}


def test_a_slot_that_is_freed_and_taken_again_before_the_copies_gets_only_its_own():
    pool, tokens = hybrid(every=1), [*range(20)]
    pool.add("a", tokens)
    compute(pool, "a", tokens, 4)
    pool.add("b", tokens)
    slot = pool.states.slot("b")
    pool.free("b")
    pool.add("c", [70] * 5)
    assert pool.states.slot("c") == slot
    ((source, destination),) = pool.states.pending()  # the snapshot of a
    assert source == pool.states.slot("a") and destination != slot
    assert compute(pool, "c", [70] * 5, 5) and pool.states.positions[slot] == 5


@pytest.mark.parametrize(
    ("slot", "start", "message"),
    [
        (1, 3, "from 3 tokens in slot 1, got states for 2 in slot 1"),
        (1, 0, "from 0 tokens in slot 1, got states for 2 in slot 1"),
        (2, 2, "from 2 tokens in slot 2, got states for 2 in slot 1"),
        (0, 2, "slot 0"),
    ],
)
def test_a_step_that_continues_from_other_states_is_refused(slot, start, message):
    states = StatePool(2)
    states.take("a")
    states.advance(["a"], [1], [0], [2])
    with pytest.raises(RuntimeError, match=message):
        states.advance(["a"], [slot], [start], [1])
    assert states.positions.tolist() == [0, 2, 0]


def test_a_step_before_the_copies_and_a_commit_without_a_step_are_refused():
    pool, tokens = hybrid(every=1), [*range(20)]
    pool.add("a", tokens)
    compute(pool, "a", tokens, 4)
    with pytest.raises(RuntimeError, match="to be copied"):
        pool.states.advance(["a"], [1], [4], [1])
    pool.reserve("a", 8)
    with pytest.raises(RuntimeError, match="for 8 tokens, got those for 4"):
        pool.commit("a", tokens, 8)


@pytest.mark.parametrize(
    ("start", "end", "is_last", "expected"),
    [
        (0, 5, False, 5),  # no border in reach
        (0, 8, False, 8),
        (0, 20, False, 8),
        (3, 11, False, 8),
        (7, 14, False, 14),  # a chunk of one token is not worth a step
        (7, 15, False, 14),
        (7, 30, False, 16),
        (7, 15, True, 15),
        (7, 8, True, 8),
        (8, 9, True, 9),
    ],
)
def test_a_chunk_ends_at_the_next_border_that_is_worth_it(start, end, is_last, expected):
    assert hybrid(every=4).chunk_end(start, end, is_last=is_last) == expected
    assert hybrid(every=4, snapshots=0).chunk_end(start, end, is_last=is_last) == end
    assert BlockPool(5, SIZE).chunk_end(start, end, is_last=is_last) == end


def test_a_border_that_a_chunk_passed_is_made_up_for_at_the_next_whole_block():
    pool, tokens = hybrid(every=4), [*range(20)]
    pool.add("a", tokens)
    for end, snapshots in ((7, 0), (9, 0), (10, 1), (12, 1), (16, 2)):
        compute(pool, "a", tokens, end)
        assert pool.states.num_snapshots == snapshots
    pool.free("a")
    assert pool.add("b", tokens[:15]).num_cached_tokens == 10


def test_snapshots_of_a_failed_request_are_removed():
    pool, tokens = hybrid(every=1), [*range(20)]
    pool.add("a", tokens)
    compute(pool, "a", tokens, 4)
    assert pool.add("b", tokens).num_cached_tokens == 4
    pool.withdraw("a")
    pool.free("a")
    assert pool.add("c", tokens).num_cached_tokens == 0
    compute(pool, "b", tokens, 8)
    assert pool.states.num_snapshots == 1  # that of b


def test_a_fork_is_refused():
    pool = hybrid()
    pool.add("a", [1, 2, 3])
    with pytest.raises(RuntimeError, match="not forked"):
        pool.fork("a", "b")
    assert pool.requests == ["a"]
