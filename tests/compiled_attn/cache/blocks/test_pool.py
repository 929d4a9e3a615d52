"""Allocation in a pool: order, tables, errors and statistics."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiled_attn.cache.blocks import BlockPool, DuplicateRequest, OutOfBlocks, UnknownRequest
from tests.compiled_attn.cache.blocks.pools import run
from tests.compiled_attn.state import state_of


def test_the_lowest_block_is_allocated_first_and_never_the_null_block() -> None:
    pool = BlockPool(num_blocks=6, block_size=2)
    pool.add("a")
    assert pool.reserve("a", 10) == [1, 2, 3, 4, 5]
    assert pool.available == 0
    assert pool.refcounts.tolist() == [0, 1, 1, 1, 1, 1]


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


def test_can_reserve_and_can_allocate_have_no_side_effects() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    run(pool, "cached", [1, 2, 3, 4])
    pool.free("cached")
    pool.add("a")
    pool.reserve("a", 1)
    before = state_of(pool)
    assert pool.can_reserve("a", 14) and not pool.can_reserve("a", 15)
    assert pool.can_allocate(12) and not pool.can_allocate(13)
    # The two blocks that would be hit are not there to be evicted as well.
    assert pool.can_allocate(12, [1, 2, 3, 4, 5]) and not pool.can_allocate(13, [1, 2, 3, 4, 5])
    assert state_of(pool) == before


def test_a_pool_of_a_million_blocks_is_made_without_a_list_of_them() -> None:
    tracemalloc.start()
    pool = BlockPool(num_blocks=1_000_000, block_size=16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * pool.num_blocks
    pool.add("a")
    assert pool.reserve("a", 16 * 1000) == list(range(1, 1001))
    assert pool.can_reserve("a", 16 * 999_999) and not pool.can_reserve("a", 16 * 999_999 + 1)


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


def test_the_table_of_a_freed_request_is_empty() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    table = run(pool, "a", list(range(10)))
    pool.free("a")
    assert (table.blocks, table.length, table.num_computed) == ([], 0, 0)
    assert not table.array.any()


def test_a_request_without_a_prompt_starts_with_nothing_computed() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    run(pool, "a", list(range(8)))
    table = pool.add("b")
    assert (table.blocks, table.length, table.num_computed) == ([], 0, 0)
    pool.reserve("b", 2)
    assert pool.commit("b", [1], 0) == 4


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


def test_adding_a_known_id_is_an_error_that_changes_nothing() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    run(pool, "a", list(range(10)))
    before = state_of(pool)
    with pytest.raises(DuplicateRequest, match=r"got 'a', which owns blocks"):
        pool.add("a", list(range(10)))
    with pytest.raises(DuplicateRequest, match=r"got 'a'"):
        pool.fork("a", "a")
    assert state_of(pool) == before


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
        lambda pool: pool.commit("a", np.zeros(9), 7),  # inside a block
        lambda pool: pool.add("b", np.zeros((2, 2), dtype=np.int64)),
        lambda pool: pool.add("b", np.zeros(6)),
        lambda pool: pool.add("b", ["x"] * 6),
        lambda pool: pool.add("b", [1] * 6, salt=3),
        lambda pool: pool.add([], [1] * 6),
        lambda pool: pool.exchange([(1, 5), (5, 2)]),
        lambda pool: pool.exchange([(1, 9)]),
        lambda pool: pool.exchange([(0, 5)]),
    ],
)
def test_bad_input_is_an_error_and_changes_nothing(call: Callable[[Any], object]) -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
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


def test_errors_can_be_pickled() -> None:
    for error in (OutOfBlocks("a", 9, 3, 1, 1, 7), UnknownRequest("a"), DuplicateRequest("a")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


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
    pool = BlockPool(num_blocks=9, block_size=4)
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


@pytest.mark.parametrize("wrong", [6.0, "6", None])
def test_a_length_that_is_no_integer_is_refused_inside_a_block(wrong):
    pool, tokens = BlockPool(num_blocks=8, block_size=4), [1, 2, 3, 4, 5, 6]
    pool.add("a", tokens)
    pool.reserve("a", 6)
    pool.commit("a", tokens, 5)
    with pytest.raises(TypeError, match="expected an integer length"):
        pool.commit("a", tokens, wrong)
    assert pool.table("a").num_computed == 5
