"""Keys of a waiting prompt: hashed once, and looked up on every call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.prefix import PrefixIndex
from tests.compiled_attn.cache.blocks.pools import run


def _pool() -> BlockPool:
    pool = BlockPool(12, 2)
    run(pool, "cached", [1, 2, 3, 4, 5, 6, 7])
    return pool


def test_a_prompt_is_hashed_once_however_often_it_is_looked_up(monkeypatch):
    pool, hashed = _pool(), []
    key = PrefixIndex.next_key
    monkeypatch.setattr(
        PrefixIndex, "next_key", lambda *given: hashed.append(given[-1]) or key(*given)
    )
    prompt = pool.prompt([1, 2, 3, 4, 9, 9, 9])
    assert [pool.can_allocate(7, prompt) for _ in range(3)] == [True] * 3
    pool.add("again", prompt)
    assert hashed == [0, 2, 4]
    assert pool.table("again").blocks == pool.table("cached").blocks[:2]


def test_a_block_that_was_evicted_is_not_found():
    pool = _pool()
    prompt = pool.prompt([1, 2, 3, 4, 5, 6, 7])
    assert pool.can_allocate(20, prompt) and not pool.can_allocate(22, prompt)
    pool.free("cached")
    pool.add("other")
    pool.reserve("other", 20)  # ten of eleven blocks: two of the three cached ones go
    assert not pool.can_allocate(7, prompt) and not pool.can_allocate(7, [1, 2, 3, 4, 5, 6, 7])
    pool.free("other")
    assert pool.add("again", prompt).num_cached_tokens == 2


def test_a_block_that_is_cached_later_is_found():
    pool, tokens = BlockPool(12, 2), [1, 2, 3, 4, 5]
    prompt = pool.prompt(tokens)
    assert not pool.can_allocate(23, prompt)
    run(pool, "first", tokens)
    assert pool.add("second", prompt).num_cached_tokens == 4


def test_the_keys_of_another_pool_are_refused():
    prompt = _pool().prompt([1, 2, 3])
    with pytest.raises(ValueError, match="prompt of this pool"):
        _pool().add("a", prompt)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), room=st.integers(4, 12))
def test_try_reserve_is_can_reserve_and_reserve(lengths, room):
    pools = BlockPool(room, 4), BlockPool(room, 4)
    for pool in pools:
        pool.add("a")
        pool.reserve("a", 3)
        pool.fork("a", "b")
    for number, length in enumerate(lengths):
        name = "ab"[number % 2]
        fits = pools[0].can_reserve(name, length)
        if fits:
            pools[0].reserve(name, length)
        assert pools[1].try_reserve(name, length) is fits
        assert repr(pools[1].table(name)) == repr(pools[0].table(name))
        assert pools[1].stats() == pools[0].stats()
