from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_attn.cache.blocks import BlockPlaces, BlockPool
from compiled_attn.cache.blocks.places import PlaceSet
from tests.compiled_attn.state import state_of
from tests.compiled_attn.work import lines_run


def taken(count: int, num_blocks: int = 20) -> BlockPlaces:
    places = BlockPlaces(num_blocks)
    assert [places.take() for _ in range(count)] == list(range(1, count + 1))
    return places


# The set under it


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 2**20, 2**20 + 1])
def test_a_full_set_has_all_members_and_nothing_beyond(size: int) -> None:
    members = PlaceSet(size, full=True)
    assert (len(members), members.lowest(), members.highest()) == (size, 0, size - 1)
    assert next(members.descending()) == size - 1
    assert size - 1 in members
    assert len(PlaceSet(size)) == 0 and 0 not in PlaceSet(size)
    assert list(PlaceSet(size).ascending()) == []


def test_a_set_agrees_with_the_built_in_one_over_random_calls() -> None:
    rng = random.Random(0)
    size = 3 * 2**20
    pool = [rng.randrange(size) for _ in range(200)] + [0, size - 1, 1023, 1024, 2**20]
    members, model = PlaceSet(size), set[int]()
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


# Places


def test_every_block_starts_at_its_own_place_and_the_null_block_belongs_to_nobody() -> None:
    places = BlockPlaces(5)
    assert [places.resolve(b) for b in range(5)] == [places.unresolve(b) for b in range(5)]
    assert places.resolve_all(range(5)).tolist() == [0, 1, 2, 3, 4]
    assert (places.num_free, places.num_used, places.num_idle) == (4, 0, 0)
    assert (places.highest_used, places.high_water) == (0, 0)


def test_the_block_at_the_lowest_free_place_is_taken() -> None:
    places = taken(5)
    places.release(5)
    places.release(2)
    places.swap([(2, 4)])  # block 4 to place 2, free block 2 to place 4
    assert [places.take() for _ in range(3)] == [2, 5, 6]
    assert places.resolve(2) == 4


def test_an_idle_block_is_not_taken_and_still_worth_keeping() -> None:
    places = taken(3)
    places.idle(1)
    places.release(2)
    assert [places.is_worth_keeping(p) for p in (1, 2, 3, 4)] == [True, False, True, False]
    assert (places.num_used, places.num_idle, places.num_free) == (1, 1, 17)
    assert places.take() == 2
    places.use(1)
    assert places.num_used == 3


def test_the_highest_place_in_use_is_exact_and_the_high_water_mark_stays() -> None:
    places = taken(5)
    places.idle(5)
    assert places.highest_used == 4
    places.release(4)
    assert (places.highest_used, places.high_water) == (3, 5)
    places.swap([(19, 3)])
    assert (places.highest_used, places.high_water) == (19, 19)


def test_tables_of_any_shape_are_resolved_at_once_and_padding_stays_null() -> None:
    places = taken(4)
    places.swap([(4, 9), (1, 2)])
    table = np.array([[4, 1, 0], [2, 0, 0]])
    assert places.resolve_all(table).tolist() == [[9, 2, 0], [1, 0, 0]]
    assert places.resolve_all(9).shape == () and int(places.resolve_all(9)) == 4
    assert places.resolve_all([]).shape == (0,)
    assert places.resolve_all(np.zeros((2, 0), np.int32)).shape == (2, 0)


def test_resolved_tables_are_new_and_int32_only_where_the_table_is() -> None:
    places = BlockPlaces(300)
    for kind, result in (
        (np.int32, np.int32),
        (np.int64, np.int64),
        (np.uint8, np.int64),
        (np.uint64, np.int64),
    ):
        table = np.array([0, 7, 200], kind)
        resolved = places.resolve_all(table)
        assert resolved.dtype == result and resolved.tolist() == [0, 7, 200]
        resolved[:] = 1
        assert table.tolist() == [0, 7, 200] and places.resolve(7) == 7


@pytest.mark.parametrize("wrong", [-1, -20, 20, 10**12])
def test_an_id_out_of_range_is_named_and_never_the_last_entry(wrong: int) -> None:
    places = taken(4)
    for call in (places.resolve, places.unresolve, places.is_worth_keeping, places.release):
        with pytest.raises(ValueError, match=rf"expected (block|place) .*got {wrong}\b"):
            call(wrong)
    for table in ([wrong], [[1, 2], [3, wrong]], np.array([wrong])):
        with pytest.raises(ValueError, match=rf"expected block .*got {wrong}\b"):
            places.resolve_all(table)


@pytest.mark.parametrize("wrong", [1.0, "a", None])
def test_an_id_that_is_no_integer_is_refused(wrong: Any) -> None:
    places = taken(4)
    with pytest.raises(TypeError, match="expected an integer block"):
        places.resolve(wrong)
    with pytest.raises(TypeError, match="expected integer blocks"):
        places.resolve_all([wrong])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.use(1), "expected a block that is free or idle, got block 1, which is in use"),
        (lambda p: p.idle(2), "expected a block that is in use, got block 2, which is idle"),
        (lambda p: p.idle(9), "expected a block that is in use, got block 9, which is free"),
        (lambda p: p.release(9), "expected a block that is in use or idle, got block 9, which is"),
        (lambda p: p.use(0), "expected block >= 1, got 0"),
        (lambda p: p.release(0), "expected block >= 1, got 0"),
        (lambda p: p.is_worth_keeping(0), "expected place >= 1, got 0"),
        (lambda p: p.swap([(1, 9), (0, 2)]), "expected place >= 1, got 0"),
        (lambda p: p.swap([(1, 9), (-1, 2)]), "expected place >= 1, got -1"),
        (lambda p: p.swap([(1, 9), (3, 20)]), "expected place < 20, got 20"),
        (lambda p: p.swap([(1, 9), (3, 9)]), "expected every place once, got place 9 twice"),
        (lambda p: p.swap([(1, 9), (9, 3)]), "expected every place once, got place 9 twice"),
        (lambda p: p.swap([(1, 9), (3, 3)]), "expected every place once, got place 3 twice"),
        (lambda p: p.compaction(-1), "expected limit >= 0, got -1"),
    ],
)
def test_bad_input_names_the_culprit_and_changes_nothing(
    call: Callable[[BlockPlaces], object], message: str
) -> None:
    places = taken(4)
    places.idle(2)
    before = state_of(places)
    with pytest.raises(ValueError, match=message):
        call(places)
    assert state_of(places) == before


def test_taking_from_full_places_is_an_error_that_changes_nothing() -> None:
    places = taken(3, num_blocks=4)
    places.idle(1)
    before = state_of(places)
    with pytest.raises(RuntimeError, match="expected a free block, got 2 used and 1 idle of 3"):
        places.take()
    assert state_of(places) == before


def test_the_highest_places_in_use_are_paired_with_the_lowest_that_are_not() -> None:
    places = taken(9)
    for block in (1, 3, 4):
        places.release(block)
    places.idle(2)
    assert places.compaction(0) == []
    assert places.compaction(2) == [(9, 1), (8, 2)]
    assert places.compaction(100) == [(9, 1), (8, 2), (7, 3), (6, 4)]
    places.swap(places.compaction(100))
    assert places.highest_used == places.num_used == 5
    assert places.compaction(100) == []
    assert [places.resolve(b) for b in (9, 8, 7, 6, 5)] == [1, 2, 3, 4, 5]


def test_a_swap_moves_blocks_with_their_states_and_again_moves_them_back() -> None:
    places = taken(6)
    places.idle(2)
    places.release(3)
    before = state_of(places)
    places.swap([(2, 6), (5, 3), (1, 4)])
    assert [places.unresolve(p) for p in range(1, 7)] == [4, 6, 5, 1, 3, 2]
    assert [places.is_worth_keeping(p) for p in range(1, 7)] == [True] * 4 + [False, True]
    assert places.highest_used == 4
    places.swap(iter([(6, 2), (3, 5), (4, 1)]))
    assert places.num_swaps == 2
    places.num_swaps = 0
    assert state_of(places) == before


def test_the_pool_hands_out_lowest_place_first_and_counts_in_places() -> None:
    pool = BlockPool(num_blocks=10, block_size=1)
    for name in "abc":
        pool.add(name)
        pool.reserve(name, 2)
    pool.free("a")
    pairs = pool.places.compaction(8)
    assert pairs == [(6, 1), (5, 2)]
    pool.places.swap(pairs)
    assert pool.table("c").blocks == [5, 6]  # ids stay
    assert pool.places.resolve_all(pool.table("c").array[:2]).tolist() == [2, 1]
    assert (pool.highest_used, pool.stats().highest_used, pool.stats().high_water) == (4, 4, 6)
    pool.add("d")
    assert pool.reserve("d", 3) == [2, 1, 7]  # at the places 5, 6, 7
    pool.free("c")
    pool.add("e")
    assert pool.reserve("e", 3) == [6, 5, 8]  # at the places 1, 2, 8


# Cost: lines of Python executed, and the size of what they touch. No time is measured.


def scattered(num_blocks: int) -> BlockPlaces:
    places = BlockPlaces(num_blocks)
    for _ in range(num_blocks - 1):
        places.take()
    for block in range(1, num_blocks, 3):
        places.release(block)
    return places


def test_making_a_million_places_is_bulk_work_of_a_few_bytes_each() -> None:
    assert lines_run(lambda: BlockPlaces(10**6)) < lines_run(lambda: BlockPlaces(10)) + 20
    tracemalloc.start()
    places = BlockPlaces(10**6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * places.num_blocks


def test_operations_cost_the_same_at_a_hundred_thousand_blocks_but_for_one_level() -> None:
    small, large = scattered(1000), scattered(10**5)
    calls: list[Callable[[BlockPlaces], object]] = [
        lambda p: p.take(),
        lambda p: p.use(1000 - 3),
        lambda p: p.release(500),
        lambda p: p.idle(503),
        lambda p: p.compaction(8),
        lambda p: p.swap(p.compaction(8)),
        lambda p: p.highest_used,
        lambda p: (p.resolve(600), p.unresolve(600)),
    ]
    for call in calls:
        cheap, dear = lines_run(lambda c=call: c(small)), lines_run(lambda c=call: c(large))
        assert dear <= 2.2 * cheap + 8
    # What a line touches does not grow either: two levels of words of 1024 bits, to a million.
    assert len(large._sets[0]._levels) == 2
    levels = BlockPlaces(10**6)._sets[0]._levels
    assert [len(words) for words in levels] == [977, 1]
    assert max(word.bit_length() for words in levels for word in words) <= 1024


def test_planning_costs_by_the_moves_and_not_by_the_pool() -> None:
    places = scattered(10**5)
    few, many = lines_run(lambda: places.compaction(10)), lines_run(lambda: places.compaction(100))
    assert many < 12 * few
    assert len(places.compaction(100)) == 100


# Any sequence of calls, against two dicts


class BlockPlacesMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.places = BlockPlaces(num_blocks)
        self.at = dict(enumerate(range(num_blocks)))  # place -> block
        self.states = dict.fromkeys(range(1, num_blocks), "free")  # of each block
        self.high_water = 0

    def blocks(self, *states: str) -> list[int]:
        return [block for block, state in self.states.items() if state in states]

    def place(self, block: int) -> int:
        return next(place for place, other in self.at.items() if other == block)

    def places_of(self, *states: str) -> Iterator[int]:
        return (self.place(block) for block in self.blocks(*states))

    @precondition(lambda self: self.blocks("free"))
    @rule()
    def take(self) -> None:
        block = self.at[min(self.places_of("free"))]
        assert self.places.take() == block
        self.states[block] = "used"

    @rule(pick=st.integers(0, 99), state=st.sampled_from(["used", "idle", "free"]))
    def change(self, pick: int, state: str) -> None:
        sources = {"used": ("free", "idle"), "idle": ("used",), "free": ("used", "idle")}
        block = pick % len(self.states) + 1
        change = {"used": self.places.use, "idle": self.places.idle, "free": self.places.release}
        if self.states[block] in sources[state]:
            change[state](block)
            self.states[block] = state
        else:
            before = state_of(self.places)
            with pytest.raises(ValueError, match=f"got block {block}, which is"):
                change[state](block)
            assert state_of(self.places) == before

    @rule(limit=st.integers(0, 8), part=st.integers(0, 2))
    def compact(self, limit: int, part: int) -> None:
        used = sorted(self.places_of("used"), reverse=True)
        rest = sorted(self.places_of("free", "idle"))
        expected = [(a, b) for a, b in zip(used, rest, strict=False) if a > b][:limit]
        pairs = self.places.compaction(limit)
        assert pairs == expected
        self.exchange(pairs[part:])

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        places = data.draw(st.permutations(range(1, len(self.at))))
        count = data.draw(st.integers(0, len(places) // 2))
        self.exchange([(places[2 * i], places[2 * i + 1]) for i in range(count)])

    def exchange(self, pairs: list[tuple[int, int]]) -> None:
        self.places.swap(pairs)
        for a, b in pairs:
            self.at[a], self.at[b] = self.at[b], self.at[a]

    @invariant()
    def both_agree(self) -> None:
        used = list(self.places_of("used"))
        self.high_water = max([self.high_water, *used])
        places = self.places
        assert (places.num_used, places.num_idle) == (len(used), len(self.blocks("idle")))
        assert places.num_free == len(self.blocks("free"))
        assert places.highest_used == max(used, default=0)
        assert places.high_water == self.high_water
        assert [places.unresolve(place) for place in self.at] == list(self.at.values())
        resolved = [self.place(block) for block in range(len(self.at))]
        assert places.resolve_all(range(len(self.at))).tolist() == resolved
        assert [places.resolve(block) for block in range(len(self.at))] == resolved
        for block, state in self.states.items():
            assert places.is_worth_keeping(self.place(block)) == (state != "free")


TestBlockPlaces = BlockPlacesMachine.TestCase
TestBlockPlaces.settings = settings(stateful_step_count=40)
