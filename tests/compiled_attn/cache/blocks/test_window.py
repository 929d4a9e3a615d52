"""Blocks before a sliding window: released, still cached, and not needed to find a prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.cache.blocks import BlockPool, PrefixIndex, UnknownRequest
from compiled_attn.cache.blocks.window import blocks_before, most_held
from tests.compiled_attn.cache.blocks.pools import run
from tests.compiled_attn.state import state_of

sizes = st.integers(1, 6)


@given(window=st.integers(1, 20), size=sizes, step=st.integers(1, 9), length=st.integers(1, 60))
def test_a_request_holds_no_more_than_it_is_said_to(window, size, step, length):
    held, computed = [], 0
    while computed < length:
        end = min(length, computed + step)
        seen = {p // size for at in range(computed, end) for p in range(at - window + 1, at + 1)}
        needed = {block for block in seen if block >= 0}
        before = blocks_before(computed, window, size)
        assert before <= min(needed) and before * size <= max(0, computed - window + 1)
        held.append(-(-end // size) - before)
        computed = end
    assert max(held) <= most_held(length, window, step, size)
    assert most_held(length, None, step, size) == -(-length // size)


@given(
    size=st.integers(1, 4),
    window=st.integers(1, 9),
    removed=st.sets(st.integers(0, 12)),
    count=st.integers(0, 40),
)
def test_the_longest_prefix_is_found_whose_last_window_is_there(size, window, removed, count):
    index, tokens = PrefixIndex(size, window=window), list(range(40))
    keys = [index.root()]
    for number in range(40 // size):
        keys.append(index.next_key(keys[-1], tokens, number * size))
        if number not in removed:
            index.insert(keys[-1], number + 1)

    def is_found(length):
        seen = range(max(0, length - window + 1), length)
        return not {position // size for position in seen} & removed

    longest = max(end for end in range(0, count + 1, size) if is_found(end))
    first = max(0, longest - window + 1) // size
    blocks, key = index.match(tokens[:count])
    assert blocks == [0] * first + list(range(first + 1, longest // size + 1))
    assert key == keys[longest // size]


def _pool() -> BlockPool:
    return BlockPool(num_blocks=9, block_size=2, key=b"k", window=4)


def test_released_blocks_stay_cached_and_leave_null_blocks():
    pool = _pool()
    table = run(pool, "a", [1, 2, 3, 4, 5, 6, 7])
    assert table.blocks == [1, 2, 3, 4]
    assert pool.release_before("a", 3) == 4
    assert table.blocks == table.array[:4].tolist() == [0, 2, 3, 4] and table.num_released == 1
    stats = pool.stats()
    assert (stats.used, stats.cached, stats.free, stats.fragmented_slots) == (3, 1, 4, 1)
    assert pool.release_before("a", 2) == pool.release_before("a", 0) == 4  # none comes back
    assert table.blocks == [0, 2, 3, 4] and table.slot(2) == 4
    with pytest.raises(ValueError, match=r"a position >= 2 of request 'a', got 1: its block was"):
        table.slot(1)
    pool.free("a")
    assert table.num_released == 0 and pool.stats().used == 0


def test_a_prompt_shares_the_last_window_of_a_request_whose_first_blocks_were_evicted():
    pool = _pool()
    run(pool, "a", [1, 2, 3, 4, 5, 6, 7])
    pool.release_before("a", 4)
    pool.add("large")
    pool.reserve("large", 10)  # two of its five blocks were cached
    assert pool.stats().evictions == 1
    table = pool.add("b", [1, 2, 3, 4, 5, 6, 9])
    assert table.blocks == [0, 2, 3] and table.num_cached_tokens == table.num_computed == 6
    assert (table.num_released, pool.refcounts[2], pool.refcounts[3]) == (1, 1, 2)
    assert pool.add("c", [1, 2, 3]).num_cached_tokens == 0  # its first block is gone


def test_what_cannot_be_released_is_refused_and_changes_nothing():
    pool = _pool()
    run(pool, "a", [1, 2, 3, 4, 5])
    pool.reserve("a", 8)
    before = state_of(pool)
    with pytest.raises(ValueError, match=r"a position <= 5 \(computed\) of request 'a', got 6"):
        pool.release_before("a", 6)
    for bad in (-1, 1.5):
        with pytest.raises((ValueError, TypeError)):
            pool.release_before("a", bad)
    with pytest.raises(UnknownRequest):
        pool.release_before("b", 0)
    for window in (0, -3):
        with pytest.raises(ValueError, match="window"):
            BlockPool(9, 2, window=window)
    assert state_of(pool) == before


def test_a_failed_request_withdraws_what_it_released():
    pool = _pool()
    run(pool, "a", [1, 2, 3, 4, 5, 6, 7])
    pool.release_before("a", 4)
    assert pool.stats().cached == 2
    pool.fork("a", "b")
    pool.withdraw("b", 1)
    assert pool.stats().cached == 1 and pool.stats().free == 5  # the first block stays
    pool.withdraw("b")
    assert pool.stats().cached == 0 and pool.stats().free == 6
    pool.free("a")
    pool.free("b")
    assert pool.stats().free == 8 and pool.add("c", [1, 2, 3]).num_cached_tokens == 0


def test_a_request_fits_that_never_holds_all_of_its_blocks_at_once():
    pool = _pool()
    assert not pool.can_allocate(40) and pool.can_allocate(40, at_once=8)
    run(pool, "a", list(range(7)))
    pool.release_before("a", 4)
    prompt = [*range(7), *range(50, 80)]
    assert pool.can_allocate(37, prompt, at_once=6)  # it shares two blocks, and takes four
    assert not pool.can_allocate(37, prompt, at_once=9)
    assert not pool.can_allocate(37, prompt)
