from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from compiled_attn.cache.blocks import (
    BlockPool,
    BlockTable,
    DuplicateRequest,
    OutOfBlocks,
    PrefixIndex,
    UnknownRequest,
)
from tests.compiled_attn.state import state_of
from tests.interrupts import count_lines, interrupted_at


def run(pool: BlockPool, name: str, tokens: list[int], salt: str | None = None) -> BlockTable:
    """Add a request and compute all of its prompt."""
    table = pool.add(name, tokens, salt=salt)
    pool.reserve(name, len(tokens))
    pool.pop_copies()
    pool.commit(name, tokens, len(tokens))
    return table


# Allocation


def test_blocks_are_handed_out_lowest_first_and_never_the_null_block() -> None:
    pool = BlockPool(num_blocks=6, block_size=2)
    pool.add("a")
    assert pool.reserve("a", 10) == [1, 2, 3, 4, 5]
    assert pool.available == 0
    assert pool.refcounts.tolist() == [0, 1, 1, 1, 1, 1]


def test_the_lowest_hole_is_filled_before_an_untouched_block_is_taken() -> None:
    pool = BlockPool(num_blocks=10, block_size=1)
    for name in "abcd":
        pool.add(name)
        pool.reserve(name, 2)
    pool.free("c")
    pool.free("a")
    pool.add("e")
    assert pool.reserve("e", 5) == [1, 2, 5, 6, 9]


def test_reserving_what_is_already_held_changes_nothing() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    pool.add("a")
    pool.reserve("a", 7)
    before = state_of(pool)
    assert pool.reserve("a", 7) == pool.reserve("a", 3) == pool.reserve("a", 0) == []
    assert pool.append("a", 0) == []
    assert state_of(pool) == before


def test_appending_takes_a_block_only_where_the_last_one_is_full() -> None:
    pool = BlockPool(num_blocks=6, block_size=2)
    table = pool.add("a")
    assert [pool.append("a") for _ in range(4)] == [[1], [], [2], []]
    assert pool.append("a", 3) == [3, 4]
    assert (table.length, table.blocks) == (7, [1, 2, 3, 4])


def test_running_out_raises_with_the_numbers_and_changes_nothing() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    run(pool, "cached", [1, 2, 3, 4])
    pool.free("cached")
    pool.add("a")
    pool.reserve("a", 3)
    before = state_of(pool)
    with pytest.raises(OutOfBlocks) as caught:
        pool.reserve("a", 16)
    assert state_of(pool) == before
    error = caught.value
    assert (error.request_id, error.length, error.needed) == ("a", 16, 6)
    assert (error.free, error.cached, error.total) == (3, 2, 7)
    assert str(error) == (
        "request 'a' needs 6 more blocks to hold 16 tokens, got 5 of 7 (3 free + 2 cached): "
        "preempt or free a request, or make the pool larger"
    )
    assert len(pool.reserve("a", 14)) == 5


def test_asking_whether_a_request_fits_has_no_side_effects() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    run(pool, "cached", [1, 2, 3, 4])
    pool.free("cached")
    pool.add("a")
    pool.reserve("a", 1)
    before = state_of(pool)
    assert pool.can_reserve("a", 14) and not pool.can_reserve("a", 15)
    assert [pool.blocks_needed("a", n) for n in (0, 2, 3, 14, 15)] == [0, 0, 1, 6, 7]
    assert pool.can_allocate(12) and not pool.can_allocate(13)
    # The two blocks that would be hit are not there to be evicted as well.
    assert pool.can_allocate(12, [1, 2, 3, 4, 5]) and not pool.can_allocate(13, [1, 2, 3, 4, 5])
    assert state_of(pool) == before


def test_a_new_request_fits_better_where_a_running_one_shares_its_prefix() -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    run(pool, "a", [1, 2, 3, 4])
    assert pool.can_allocate(8, [1, 2, 3, 4, 5, 6, 7, 8])
    assert not pool.can_allocate(8, [1, 2, 3, 4, 5, 6, 7, 8], salt="other")
    assert not pool.can_allocate(9, [1, 2, 3, 4, 5, 6, 7, 8, 9])


def test_a_pool_of_a_million_blocks_is_made_without_a_list_of_them() -> None:
    tracemalloc.start()
    pool = BlockPool(num_blocks=1_000_000, block_size=16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * pool.num_blocks
    pool.add("a")
    assert pool.reserve("a", 16 * 1000) == list(range(1, 1001))
    assert pool.can_reserve("a", 16 * 999_999) and not pool.can_reserve("a", 16 * 999_999 + 1)


# Tables


@pytest.mark.parametrize("block_size", [1, 2, 7, 16])
def test_positions_slots_and_fragmentation_are_exact_for_every_length(block_size: int) -> None:
    pool = BlockPool(num_blocks=9, block_size=block_size)
    for hole in range(3):  # an odd order of ids: 2, 4, 5, ...
        pool.add(hole)
        pool.reserve(hole, block_size)
    pool.free(1)
    table = pool.add("a")
    ids = [2, 4, 5, 6]
    for length in range(1, 4 * block_size + 1):
        pool.append("a")
        count = (length + block_size - 1) // block_size
        slots = [ids[p // block_size] * block_size + p % block_size for p in range(length)]
        assert table.blocks == ids[:count]
        assert (table.length, table.last_position) == (length, length - 1)
        assert [table.slot(p) for p in range(length)] == slots
        assert table.fragmentation == count * block_size - length
        assert pool.stats().fragmented_slots == table.fragmentation


def test_a_prompt_of_an_exact_multiple_leaves_a_full_last_block() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    table = run(pool, "a", list(range(8)))
    assert (table.blocks, table.last_position, table.fragmentation) == ([1, 2], 7, 0)
    assert pool.append("a") == [3]
    assert (table.slot(8), table.fragmentation) == (12, 3)


def test_a_block_table_is_padded_with_the_null_block_and_owned_by_the_caller() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    table = pool.add("a")
    assert table.block_table().tolist() == [] and table.block_table(pad_to=2).tolist() == [0, 0]
    pool.reserve("a", 9)
    row = table.block_table(pad_to=5)
    assert row.dtype == np.int32
    row[:] = 99
    assert table.block_table().tolist() == [1, 2, 3]
    assert table.block_table(pad_to=5).tolist() == [1, 2, 3, 0, 0]
    with pytest.raises(ValueError, match=r"pad_to >= 3, the blocks of request 'a', got 2"):
        table.block_table(pad_to=2)


def test_the_array_follows_the_list_in_place_and_is_not_made_anew_each_step() -> None:
    pool = BlockPool(num_blocks=2000, block_size=1)
    table = pool.add("a")
    arrays = {}
    for length in range(1, 1001):
        pool.append("a")
        arrays[id(table.array)] = table.array  # kept alive, so that ids stay distinct
        assert table.array[length - 1] == length
    assert len(arrays) == 8  # capacities 8, 16, ..., 1024
    assert table.array[:1000].tolist() == table.blocks
    assert not table.array[1000:].any()


@pytest.mark.parametrize("position", [-1, 5, 100])
def test_a_position_outside_of_the_table_is_an_error_that_names_the_request(position: int) -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    table = pool.add("a")
    pool.reserve("a", 5)
    with pytest.raises(ValueError, match=rf"position .*got {position}"):
        table.slot(position)


def test_an_empty_table_has_no_last_position() -> None:
    table = BlockPool(num_blocks=9, block_size=4).add("a")
    with pytest.raises(ValueError, match=r"empty table of request 'a'"):
        _ = table.last_position


def test_the_table_of_a_freed_request_shows_no_block_any_more() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    table = run(pool, "a", list(range(10)))
    pool.free("a")
    assert (table.blocks, table.length, table.num_computed) == ([], 0, 0)
    assert not table.array.any()


# Free, preempt and the errors around them


def test_freeing_twice_or_an_unknown_request_names_it_and_changes_nothing() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    run(pool, "a", list(range(10)))
    run(pool, "b", list(range(10)))
    pool.free("a")
    before = state_of(pool)
    for name in ("a", "never"):
        for call in (pool.free, pool.preempt, pool.table):
            with pytest.raises(UnknownRequest, match=f"got '{name}', which was never added"):
                call(name)
    assert state_of(pool) == before
    assert "a" not in pool and "b" in pool


def test_a_request_that_finishes_can_be_added_again_in_the_same_step() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    first = run(pool, "a", list(range(12)))
    pool.free("a")
    second = pool.add("a", list(range(12)))
    assert second is not first and second.blocks == [1, 2]
    assert pool.reserve("a", 12) == [3]
    assert first.blocks == []
    assert pool.stats().used == 3


def test_adding_a_known_id_is_an_error_that_changes_nothing() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    run(pool, "a", list(range(10)))
    before = state_of(pool)
    with pytest.raises(DuplicateRequest, match=r"got 'a', which holds blocks"):
        pool.add("a", list(range(10)))
    with pytest.raises(DuplicateRequest, match=r"got 'a'"):
        pool.fork("a", "a")
    assert state_of(pool) == before


def test_a_preempted_request_finds_its_full_blocks_again() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    tokens = list(range(10))
    blocks = list(run(pool, "a", tokens).blocks)
    pool.preempt("a")
    assert "a" not in pool and pool.stats().used == 0
    table = pool.add("a", [*tokens, 10, 11])
    assert table.blocks == blocks[:2] and table.num_computed == 8
    assert pool.stats().preemptions == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.reserve("a", -1),
        lambda pool: pool.reserve("a", 2.5),
        lambda pool: pool.reserve("b", 1),
        lambda pool: pool.can_reserve("a", -1),
        lambda pool: pool.can_reserve("b", 1),
        lambda pool: pool.can_allocate(-1),
        lambda pool: pool.append("a", -1),
        lambda pool: pool.append("b"),
        lambda pool: pool.fork("b", "c"),
        lambda pool: pool.commit("b", [], 0),
        lambda pool: pool.commit("a", list(range(9)), 5),  # already computed up to 6
        lambda pool: pool.commit("a", list(range(99)), 11),  # reserved up to 10
        lambda pool: pool.commit("a", list(range(8)), 9),
        lambda pool: pool.commit("a", [0, 1, 2, 3, 4, 5, 6, 0.5, 8], 9),
        lambda pool: pool.commit("a", np.zeros(9), 9),
        lambda pool: pool.add("b", np.zeros((2, 2), dtype=np.int64)),
        lambda pool: pool.add("b", np.zeros(6)),
        lambda pool: pool.add("b", ["x"] * 6),
        lambda pool: pool.add("b", [1] * 6, salt=3),
        lambda pool: pool.add([], [1] * 6),
        lambda pool: pool.places.resolve(-1),
        lambda pool: pool.places.resolve_all([1, 9]),
        lambda pool: pool.places.swap([(1, 5), (5, 2)]),
        lambda pool: pool.places.swap([(1, 9)]),
        lambda pool: pool.places.swap([(0, 5)]),
    ],
)
@pytest.mark.parametrize("partial_hits", [False, True])
def test_bad_input_is_an_error_and_changes_nothing(
    call: Callable[[Any], object], partial_hits: bool
) -> None:
    pool = BlockPool(num_blocks=9, block_size=4, partial_hits=partial_hits)
    pool.add("a", list(range(6)))
    pool.reserve("a", 10)
    pool.commit("a", list(range(6)), 6)
    before = state_of(pool)
    with pytest.raises((ValueError, TypeError, UnknownRequest)):
        call(pool)
    assert state_of(pool) == before


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (-3, 4), (9, 0), (9, -1)])
def test_a_pool_that_could_hold_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"expected (num_blocks|block_size)"):
        BlockPool(num_blocks, block_size)


def test_errors_survive_the_way_to_another_process() -> None:
    for error in (OutOfBlocks("a", 9, 3, 1, 1, 7), UnknownRequest("a"), DuplicateRequest("a")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


# Prefix sharing


def test_equal_prompts_share_their_full_blocks_but_the_last_token_is_always_computed() -> None:
    pool = BlockPool(num_blocks=20, block_size=4)
    first = run(pool, "a", list(range(8)))
    assert first.num_cached_tokens == 0
    hits = {}
    for length in (4, 5, 7, 8, 9, 12):
        hits[length] = pool.add(length, list(range(length))).num_cached_tokens
    assert hits == {4: 0, 5: 4, 7: 4, 8: 4, 9: 8, 12: 8}
    table = pool.table(9)
    assert (table.blocks, table.length, table.num_computed) == ([1, 2], 8, 8)
    assert pool.refcounts[[1, 2]].tolist() == [6, 3]
    assert pool.reserve(9, 9) == [3]


def test_another_salt_or_another_first_token_shares_nothing() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    run(pool, "a", [1, 2, 3, 4, 5], salt="x")
    assert pool.add("b", [1, 2, 3, 4, 5]).blocks == []
    assert pool.add("c", [1, 2, 3, 4, 5], salt="y").blocks == []
    assert pool.add("d", [9, 2, 3, 4, 5], salt="x").blocks == []
    assert pool.add("e", [1, 2, 3, 4, 5], salt="x").blocks == [1, 2]


def test_blocks_are_found_only_after_they_were_committed_full() -> None:
    pool = BlockPool(num_blocks=20, block_size=4)
    pool.add("a", list(range(12)))
    pool.reserve("a", 12)
    assert pool.add("b", list(range(12))).blocks == []
    pool.commit("a", list(range(12)), 7)
    assert pool.add("c", list(range(12))).blocks == [1]
    pool.commit("a", list(range(12)), 8)
    assert pool.add("d", list(range(12))).blocks == [1, 2]


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    tokens = [1, 2, 3]
    run(pool, "turn 1", tokens)
    for token in (4, 5, 6):
        tokens.append(token)
        pool.append("turn 1")
        pool.commit("turn 1", tokens, len(tokens))
    pool.free("turn 1")
    assert pool.add("turn 2", np.array([*tokens, 7, 8])).num_cached_tokens == 6


def test_committing_costs_only_the_blocks_that_became_full(monkeypatch: pytest.MonkeyPatch) -> None:
    indexed: list[tuple[int, int]] = []
    put = PrefixIndex.put

    def counted(self: PrefixIndex, parent: bytes, data: bytes, block: int) -> bytes:
        indexed.append((block, len(data) // 8))
        return put(self, parent, data, block)

    pool = BlockPool(num_blocks=100, block_size=4)
    run(pool, "a", list(range(41)))
    table = pool.add("b", list(range(42)))
    monkeypatch.setattr(PrefixIndex, "put", counted)
    pool.reserve("b", 60)
    for length in range(42, 61):
        pool.commit("b", list(range(60)), length)
    assert indexed == [(block, 4) for block in table.blocks[10:]]
    assert table.num_computed == 60


def test_content_that_is_already_found_elsewhere_keeps_its_first_block() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    for name in ("a", "b"):
        pool.add(name, [1, 2, 3, 4, 5])
        pool.reserve(name, 5)
    pool.commit("b", [1, 2, 3, 4, 5], 2)
    pool.commit("a", [1, 2, 3, 4, 5], 5)
    assert pool.add("c", [1, 2, 3, 4, 5]).blocks == [4, 2]
    pool.free("a")  # its twin of the first block is free, its second block cached
    pool.add("d")
    assert pool.reserve("d", 4) == [1, 3]


# Content that nobody else may find


def test_what_is_withdrawn_is_never_found_nor_what_follows_it() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    tokens = list(range(10))
    table = pool.add("a", tokens)
    pool.reserve("a", 10)
    pool.commit("a", tokens, 4)
    pool.withdraw("a")
    pool.commit("a", tokens, 10)  # its chain is broken
    assert table.num_computed == 10
    assert pool.add("b", tokens).num_cached_tokens == 0
    pool.free("b")
    pool.free("a")
    assert (pool.stats().cached, pool.stats().free) == (0, 19)


@pytest.mark.parametrize("end", ["free", "preempt"])
def test_nothing_withdrawn_stays_cached_when_its_request_leaves(end: str) -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    tokens = list(range(8))
    run(pool, "a", tokens)
    pool.withdraw("a")
    getattr(pool, end)("a")
    assert (pool.stats().cached, pool.stats().free) == (0, 19)
    assert run(pool, "a", tokens).num_cached_tokens == 0  # the same name begins anew
    assert pool.add("b", tokens).num_cached_tokens == 6


def test_blocks_before_the_first_that_is_withdrawn_are_found_as_before() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    tokens = list(range(8))
    run(pool, "a", tokens)
    pool.withdraw("a", first=2)
    pool.free("a")
    assert pool.add("b", tokens).num_cached_tokens == 4
    with pytest.raises(ValueError, match="first >= 0"):
        pool.withdraw("b", first=-1)


def test_a_fork_of_a_request_that_was_withdrawn_is_never_found_either() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    tokens = list(range(8))
    pool.add("a", tokens)
    pool.reserve("a", 8)
    pool.commit("a", tokens, 3)
    pool.withdraw("a")
    pool.fork("a", "b")
    pool.free("a")
    pool.commit("b", tokens, 8)
    pool.fork("b", "c")
    assert pool.add("d", tokens).num_cached_tokens == 0
    for name in "bcd":
        pool.free(name)
    assert pool.stats().cached == 0


def test_who_holds_a_withdrawn_block_keeps_it_until_the_end() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    tokens = list(range(8))
    run(pool, "a", tokens)
    shared = pool.add("b", tokens).blocks
    pool.withdraw("a")
    pool.free("a")
    assert pool.table("b").blocks == shared and len(shared) == 3
    assert pool.add("c", tokens).num_cached_tokens == 0
    pool.free("b")
    assert pool.stats().cached == 0


def test_an_equal_block_of_another_request_is_found_instead_of_a_withdrawn_one() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    tokens = list(range(4))
    for name in ("a", "twin"):
        pool.add(name, tokens)
        pool.reserve(name, 4)
    pool.commit("a", tokens, 4)
    pool.commit("twin", tokens, 4)
    pool.withdraw("a")
    assert pool.add("c", [*tokens, 4]).blocks == pool.table("twin").blocks


def test_a_withdrawn_twin_does_not_come_back_when_the_block_that_is_found_goes() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    tokens = list(range(4))
    for name in ("a", "twin"):
        pool.add(name, tokens)
        pool.reserve(name, 4)
    pool.commit("a", tokens, 4)
    pool.commit("twin", tokens, 4)
    pool.withdraw("twin")
    pool.withdraw("a")
    assert pool.add("c", [*tokens, 4]).num_cached_tokens == 0


def test_free_blocks_are_taken_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(num_blocks=6, block_size=2)
    run(pool, "a", [1, 2, 3, 4])
    pool.free("a")
    pool.add("b")
    assert pool.reserve("b", 6) == [3, 4, 5]
    assert pool.stats().evictions == 0
    assert pool.append("b") == [2]
    assert pool.stats().evictions == 1
    assert pool.add("c", [1, 2, 3, 4, 5]).blocks == [1]


def test_the_tail_of_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = BlockPool(num_blocks=7, block_size=1)
    old, new = [1, 2, 3], [7, 8, 9]
    run(pool, "old", old)  # blocks 1, 2, 3
    run(pool, "new", new)  # blocks 4, 5, 6
    pool.free("old")
    pool.free("new")
    pool.add("x")
    assert [pool.append("x")[0] for _ in range(6)] == [3, 2, 1, 6, 5, 4]


def test_using_a_cached_chain_again_makes_it_the_most_recent() -> None:
    pool = BlockPool(num_blocks=7, block_size=1)
    run(pool, "old", [1, 2, 3])
    run(pool, "new", [7, 8, 9])
    pool.free("old")
    pool.free("new")
    assert pool.add("again", [1, 2, 3]).blocks == [1, 2]
    pool.free("again")
    pool.add("x")
    assert [pool.append("x")[0] for _ in range(6)] == [3, 6, 5, 4, 2, 1]


def run_side_by_side(pool: BlockPool, *prompts: list[int]) -> None:
    """Requests 0, 1, ... that all start before the first of them is computed."""
    for number, prompt in enumerate(prompts):
        pool.add(number, prompt)
        pool.reserve(number, len(prompt))
    for number, prompt in enumerate(prompts):
        pool.commit(number, prompt, len(prompt))


def test_content_that_somebody_still_holds_is_found_after_its_first_block_was_evicted() -> None:
    pool = BlockPool(num_blocks=7, block_size=1)
    run_side_by_side(pool, [1, 2], [1, 2, 3])  # blocks 1, 2 and their twins 3, 4; block 5
    pool.free(0)
    pool.add("x")
    assert [pool.append("x")[0] for _ in range(3)] == [6, 2, 1]
    assert pool.add("y", [1, 2, 3, 4]).blocks == [3, 4, 5]


def test_a_prefix_is_not_evicted_before_what_follows_its_twin() -> None:
    pool = BlockPool(num_blocks=6, block_size=1)
    run_side_by_side(pool, [1, 2], [1, 2, 3])
    pool.free(0)
    pool.free(1)  # its twins are free; 1 and 2 were as recently used as block 5, which needs them
    pool.add("x")
    assert [pool.append("x")[0] for _ in range(5)] == [3, 4, 5, 2, 1]


# Fork and copy on write


def test_a_fork_shares_all_blocks_until_one_of_both_writes() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    parent = run(pool, "p", list(range(6)))
    child = pool.fork("p", "c")
    assert child.blocks == parent.blocks == [1, 2]
    assert (child.length, child.num_computed, child.num_cached_tokens) == (6, 6, 0)
    assert pool.refcounts[:3].tolist() == [0, 2, 2]
    assert pool.pop_copies() == []
    assert pool.blocks_needed("c", 7) == 1
    assert pool.append("c") == [3]
    assert (parent.blocks, child.blocks) == ([1, 2], [1, 3])
    assert child.array[:2].tolist() == [1, 3]
    assert pool.pop_copies() == [(2, 3)]
    assert pool.pop_copies() == []
    assert pool.append("p") == []  # alone in block 2 by now
    assert pool.stats().copies == 1


def test_the_parent_copies_where_it_writes_first() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    parent = run(pool, "p", list(range(6)))
    child = pool.fork("p", "c")
    assert pool.append("p", 3) == [3, 4]
    assert (parent.blocks, child.blocks) == ([1, 3, 4], [1, 2])
    assert pool.append("c") == []
    assert pool.pop_copies() == [(2, 3)]


def test_a_full_last_block_is_never_copied() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    run(pool, "p", list(range(8)))
    child = pool.fork("p", "c")
    assert pool.append("c") == [3] and pool.append("p") == [4]
    assert child.blocks == [1, 2, 3]
    assert pool.pop_copies() == []


def test_the_children_of_a_fork_have_their_own_chains() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    run(pool, "p", [1, 2, 3])
    pool.fork("p", "c")
    for name, token in (("p", 4), ("c", 5)):
        pool.append(name)
        pool.pop_copies()
        pool.commit(name, [1, 2, 3, token], 4)
    assert pool.add("x", [1, 2, 3, 4, 0]).blocks == pool.table("p").blocks
    assert pool.add("y", [1, 2, 3, 5, 0]).blocks == pool.table("c").blocks


def test_copies_of_copies_read_the_first_source_so_that_their_order_is_free() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    run(pool, "p", [1, 2])
    pool.fork("p", "c")
    pool.append("c")
    pool.fork("c", "g")
    pool.append("g")
    assert pool.pop_copies() == [(1, 2), (1, 3)]


def test_the_source_of_a_pending_copy_stays_until_the_copy_is_popped() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    run(pool, "p", [1, 2])
    pool.fork("p", "c")
    pool.append("c")
    pool.free("p")
    pool.add("x")
    assert pool.reserve("x", 4) == [3]
    assert not pool.can_reserve("x", 5)
    assert pool.pop_copies() == [(1, 2)]
    assert pool.reserve("x", 5) == [1]


def test_a_pending_copy_does_not_make_its_source_look_shared() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    run(pool, "p", [1, 2])
    pool.fork("p", "c")
    pool.append("c")
    assert pool.append("p") == []
    assert pool.pop_copies() == [(1, 2)]


def test_freeing_the_destination_cancels_the_copy() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    run(pool, "p", [1, 2])
    pool.fork("p", "c")
    pool.append("c")
    pool.free("c")
    assert pool.refcounts[:3].tolist() == [0, 1, 0]
    assert pool.pop_copies() == []


def test_committing_a_block_whose_copy_was_not_taken_is_an_error_that_changes_nothing() -> None:
    pool = BlockPool(num_blocks=9, block_size=2)
    run(pool, "p", [1])
    pool.fork("p", "c")
    pool.append("c")
    before = state_of(pool)
    with pytest.raises(RuntimeError, match=r"request 'c' .*got blocks \[2\] waiting"):
        pool.commit("c", [1, 2], 2)
    assert state_of(pool) == before
    pool.pop_copies()
    pool.commit("c", [1, 2], 2)
    assert pool.add("x", [1, 2, 3]).blocks == [2]


def forked(children: int = 1) -> BlockPool:
    """Children of one request, each waiting for a copy of its half filled block 2."""
    pool = BlockPool(num_blocks=20, block_size=2)
    run(pool, "a", [1, 2, 3])
    for number in range(children):
        pool.fork("a", f"child {number}")
        pool.append(f"child {number}")
    return pool


def test_copies_stay_pending_until_they_are_said_to_be_performed() -> None:
    pool = forked()
    before = state_of(pool)
    assert pool.pending_copies() == pool.pending_copies() == [(2, 3)]
    assert state_of(pool) == before  # looking at them changed nothing
    with pytest.raises(RuntimeError, match=r"got blocks \[3\] waiting.*copied\(\)"):
        pool.commit("child 0", [1, 2, 3, 4], 4)
    pool.copied(pool.pending_copies())
    assert pool.pending_copies() == [] and pool.refcounts[2] == 1
    pool.commit("child 0", [1, 2, 3, 4], 4)


def test_of_several_copies_exactly_those_performed_are_pending_no_more() -> None:
    pool = forked(children=3)
    pool.free("a")
    assert pool.pending_copies() == [(2, 3), (2, 4), (2, 5)]
    pool.copied(np.array([(2, 4)]))
    assert pool.pending_copies() == [(2, 3), (2, 5)] and pool.refcounts[2] == 2
    pool.copied([(2, 5), (2, 3)])
    assert pool.pending_copies() == [] and pool.refcounts[2] == 0


def test_a_copy_that_is_not_pending_any_more_is_ignored() -> None:
    pool = forked(children=2)
    copies = pool.pending_copies()
    pool.free("child 0")  # cancels the copy into block 3
    other = run(pool, "other", [7, 8, 9])
    assert other.blocks == [3, 5]
    pool.fork("other", "third")
    assert pool.append("third") == [6] and pool.append("other", 0) == []
    pool.copied([*copies, (3, 6), (1, 2)])
    assert pool.pending_copies() == [(5, 6)]
    before = state_of(pool)
    pool.copied(copies)
    assert state_of(pool) == before
    assert pool.refcounts[:7].tolist() == [0, 2, 1, 2, 1, 2, 1]


@pytest.mark.parametrize("pairs", [[(2, 3), (2, -3)], [(2, 3), 5], [(2, 3), (2, "3")], [(2, 3, 4)]])
def test_copies_that_are_no_pairs_of_blocks_are_refused_and_nothing_changes(pairs: Any) -> None:
    pool = forked()
    before = state_of(pool)
    with pytest.raises((TypeError, ValueError)):
        pool.copied(pairs)
    assert state_of(pool) == before


def test_an_interrupted_free_can_be_repeated() -> None:
    def pool_of_three() -> BlockPool:
        pool = BlockPool(num_blocks=20, block_size=2)
        run(pool, "a", list(range(8)))
        return pool

    lines = count_lines(lambda: pool_of_three().free("a")) - count_lines(pool_of_three)
    for n in range(lines):
        pool = pool_of_three()
        with suppress(KeyboardInterrupt), interrupted_at(n) as cut:
            pool.free("a")
        if "a" in pool:
            pool.free("a")
        assert "a" not in pool and (pool.refcounts >= 0).all(), cut.where
        # The one block that was on its way is out of use until the pool is made anew.
        assert pool.available >= 18, cut.where


def test_a_copy_on_write_counts_when_the_pool_runs_out() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    run(pool, "p", [1, 2, 3])
    pool.fork("p", "c")
    before = state_of(pool)
    assert not pool.can_reserve("c", 4)
    with pytest.raises(OutOfBlocks, match=r"request 'c' needs 1 more blocks to hold 4 tokens"):
        pool.append("c")
    assert state_of(pool) == before


# Statistics


def test_the_statistics_are_exact() -> None:
    pool = BlockPool(num_blocks=20, block_size=4)
    run(pool, "a", list(range(10)))  # blocks 1, 2, 3
    run(pool, "b", list(range(9)))  # hits 1, 2; block 4
    pool.fork("a", "c")
    pool.free("b")
    stats = pool.stats()
    assert (stats.total, stats.used, stats.free, stats.cached) == (19, 3, 16, 0)
    assert (stats.requests, stats.allocations, stats.evictions, stats.copies) == (2, 4, 0, 0)
    assert (stats.highest_used, stats.high_water, stats.peak_used) == (3, 4, 4)
    assert (stats.queried_tokens, stats.hit_tokens, stats.hit_ratio) == (19, 8, 8 / 19)
    assert stats.fragmented_slots == 2  # block 3 of a and c, counted once
    assert stats.fragmented_bytes(bytes_per_slot=512) == 1024
    for name in ("a", "c"):
        pool.free(name)
    stats = pool.stats()
    assert (stats.used, stats.cached, stats.highest_used, stats.high_water) == (0, 2, 0, 4)
    assert stats.fragmented_slots == 0


def test_the_memory_of_the_pool_does_not_grow_with_the_calls() -> None:
    pool = BlockPool(num_blocks=9, block_size=4, partial_hits=True)
    sizes = []
    for _ in range(100):
        run(pool, "a", list(range(10)))
        pool.fork("a", "b")
        pool.append("b")
        pool.free("a")
        pool.free("b")
        sizes.append(len(pickle.dumps(state_of(pool))))
    assert max(sizes[2:]) - min(sizes[2:]) < 64  # counters grow, nothing else


def test_the_reference_counts_are_a_live_view_that_cannot_be_written() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    counts = pool.refcounts
    run(pool, "a", [1, 2])
    assert counts.tolist() == [0, 1, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        counts[1] = 5
