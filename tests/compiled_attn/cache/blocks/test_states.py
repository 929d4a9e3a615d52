from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_attn.cache.blocks.states import BlockSet, BlockStates
from tests.compiled_attn.state import state_of
from tests.compiled_attn.work import lines_run


def taken(count: int, num_blocks: int = 20) -> BlockStates:
    states = BlockStates(num_blocks)
    assert [states.take() for _ in range(count)] == list(range(1, count + 1))
    return states


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 2**20, 2**20 + 1])
def test_a_full_set_has_all_members_and_nothing_beyond(size: int) -> None:
    members = BlockSet(size, full=True)
    assert (len(members), members.lowest(), members.highest()) == (size, 0, size - 1)
    assert next(members.descending()) == size - 1
    assert size - 1 in members
    assert len(BlockSet(size)) == 0 and 0 not in BlockSet(size)
    assert list(BlockSet(size).ascending()) == []


def test_a_set_agrees_with_the_built_in_one_over_random_calls() -> None:
    rng = random.Random(0)
    size = 3 * 2**20
    pool = [rng.randrange(size) for _ in range(200)] + [0, size - 1, 1023, 1024, 2**20]
    members, model = BlockSet(size), set[int]()
    for _ in range(3000):
        member = rng.choice(pool)
        if member in model:
            members.remove(member)
        else:
            members.add(member)
        model ^= {member}
        assert (member in members, len(members)) == (member in model, len(model))
        if model:
            assert (members.lowest(), members.highest()) == (min(model), max(model))
    assert list(members.ascending()) == sorted(model)
    assert list(members.descending()) == sorted(model, reverse=True)


# States


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.use(1), "expected a block that is free or cached, got block 1, which is used"),
        (lambda s: s.cache(2), "expected a block that is used, got block 2, which is cached"),
        (lambda s: s.cache(9), "expected a block that is used, got block 9, which is free"),
        (lambda s: s.release(9), "expected a block that is used or cached, got block 9, which is"),
        (lambda s: s.use(0), "expected block >= 1, got 0"),
        (lambda s: s.release(-1), "expected block >= 1, got -1"),
        (lambda s: s.release(20), "expected block < 20, got 20"),
        (lambda s: s.has_content(0), "expected block >= 1, got 0"),
        (lambda s: s.exchange([(1, 9), (0, 2)]), "expected block >= 1, got 0"),
        (lambda s: s.exchange([(1, 9), (-1, 2)]), "expected block >= 1, got -1"),
        (lambda s: s.exchange([(1, 9), (3, 20)]), "expected block < 20, got 20"),
        (lambda s: s.exchange([(1, 9), (3, 9)]), "expected every block once, got block 9 twice"),
        (lambda s: s.exchange([(1, 9), (9, 3)]), "expected every block once, got block 9 twice"),
        (lambda s: s.exchange([(1, 9), (3, 3)]), "expected every block once, got block 3 twice"),
        (lambda s: s.compaction(-1), "expected limit >= 0, got -1"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(
    call: Callable[[BlockStates], object], message: str
) -> None:
    states = taken(4)
    states.cache(2)
    before = state_of(states)
    with pytest.raises(ValueError, match=message):
        call(states)
    assert state_of(states) == before


def test_taking_a_block_when_none_is_free_is_an_error_that_changes_nothing() -> None:
    states = taken(3, num_blocks=4)
    states.cache(1)
    before = state_of(states)
    with pytest.raises(RuntimeError, match="expected a free block, got 2 used and 1 cached of 3"):
        states.take()
    assert state_of(states) == before


# Cost: lines of Python executed, and the size of what they touch. No time is measured.


def scattered(num_blocks: int) -> BlockStates:
    states = BlockStates(num_blocks)
    for _ in range(num_blocks - 1):
        states.take()
    for block in range(1, num_blocks, 3):
        states.release(block)
    return states


def test_a_million_blocks_are_made_in_bulk() -> None:
    assert lines_run(lambda: BlockStates(10**6)) < lines_run(lambda: BlockStates(10)) + 20
    tracemalloc.start()
    states = BlockStates(10**6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * states.num_blocks


def test_operations_cost_the_same_at_a_hundred_thousand_blocks_but_for_one_level() -> None:
    small, large = scattered(1000), scattered(10**5)
    calls: list[Callable[[BlockStates], object]] = [
        lambda s: s.take(),
        lambda s: s.use(1000 - 3),
        lambda s: s.release(500),
        lambda s: s.cache(503),
        lambda s: s.compaction(8),
        lambda s: s.exchange(s.compaction(8)),
        lambda s: s.highest_used,
    ]
    for call in calls:
        cheap, dear = lines_run(lambda c=call: c(small)), lines_run(lambda c=call: c(large))
        assert dear <= 2.2 * cheap + 8


def test_planning_costs_by_the_moves_and_not_by_the_pool() -> None:
    states = scattered(10**5)
    few, many = lines_run(lambda: states.compaction(10)), lines_run(lambda: states.compaction(100))
    assert many < 12 * few
    assert len(states.compaction(100)) == 100


# Any sequence of calls, against a dict


class BlockStatesMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.states = BlockStates(num_blocks)
        self.model = dict.fromkeys(range(1, num_blocks), "free")
        self.high_water = 0

    def blocks(self, *states: str) -> list[int]:
        return [block for block, state in self.model.items() if state in states]

    @precondition(lambda self: self.blocks("free"))
    @rule()
    def take(self) -> None:
        block = min(self.blocks("free"))
        assert self.states.take() == block
        self.model[block] = "used"

    @rule(pick=st.integers(0, 99), state=st.sampled_from(["used", "cached", "free"]))
    def change(self, pick: int, state: str) -> None:
        sources = {"used": ("free", "cached"), "cached": ("used",), "free": ("used", "cached")}
        block = pick % len(self.model) + 1
        change = {"used": self.states.use, "cached": self.states.cache, "free": self.states.release}
        if self.model[block] in sources[state]:
            change[state](block)
            self.model[block] = state
        else:
            before = state_of(self.states)
            with pytest.raises(ValueError, match=f"got block {block}, which is"):
                change[state](block)
            assert state_of(self.states) == before

    @rule(limit=st.integers(0, 8), part=st.integers(0, 2))
    def compact(self, limit: int, part: int) -> None:
        pairs = zip(sorted(self.blocks("used"))[::-1], self.blocks("free", "cached"), strict=False)
        expected = [(a, b) for a, b in pairs if a > b][:limit]
        assert self.states.compaction(limit) == expected
        self.exchange(expected[part:])

    @rule(data=st.data())
    def shuffle(self, data: st.DataObject) -> None:
        blocks = data.draw(st.permutations(range(1, len(self.model) + 1)))
        count = data.draw(st.integers(0, len(blocks) // 2))
        self.exchange([(blocks[2 * i], blocks[2 * i + 1]) for i in range(count)])

    def exchange(self, pairs: list[tuple[int, int]]) -> None:
        self.states.exchange(pairs)
        for a, b in pairs:
            self.model[a], self.model[b] = self.model[b], self.model[a]

    @invariant()
    def both_agree(self) -> None:
        used, states = self.blocks("used"), self.states
        self.high_water = max([self.high_water, *used])
        assert (states.num_used, states.num_cached) == (len(used), len(self.blocks("cached")))
        assert states.num_free == len(self.blocks("free"))
        assert states.highest_used == max(used, default=0)
        assert states.high_water == self.high_water
        for block, state in self.model.items():
            assert states.has_content(block) == (state != "free")


TestBlockStates = BlockStatesMachine.TestCase
TestBlockStates.settings = settings(stateful_step_count=40)
