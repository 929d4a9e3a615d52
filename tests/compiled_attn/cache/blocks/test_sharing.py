"""Equal prompts in a pool: what is found, withdrawn and evicted."""

from __future__ import annotations

import numpy as np
import pytest

from compiled_attn.cache.blocks import BlockPool, PrefixIndex
from tests.compiled_attn.cache.blocks.pools import run


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


def test_blocks_before_the_first_that_is_withdrawn_are_found_as_before() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    tokens = list(range(8))
    run(pool, "a", tokens)
    pool.withdraw("a", first=2)
    pool.free("a")
    assert pool.add("b", tokens).num_cached_tokens == 4
    with pytest.raises(ValueError, match="first >= 0"):
        pool.withdraw("b", first=-1)


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


def run_together(pool: BlockPool, *prompts: list[int]) -> None:
    """Requests 0, 1, ... that all start before the first of them is computed."""
    for number, prompt in enumerate(prompts):
        pool.add(number, prompt)
        pool.reserve(number, len(prompt))
    for number, prompt in enumerate(prompts):
        pool.commit(number, prompt, len(prompt))


def test_a_duplicate_in_use_is_found_after_the_first_block_was_evicted() -> None:
    pool = BlockPool(num_blocks=7, block_size=1)
    run_together(pool, [1, 2], [1, 2, 3])  # blocks 1, 2 and their duplicates 3, 4; block 5
    pool.free(0)
    pool.add("x")
    assert [pool.append("x")[0] for _ in range(3)] == [6, 2, 1]
    assert pool.add("y", [1, 2, 3, 4]).blocks == [3, 4, 5]


def test_a_prefix_is_not_evicted_before_what_follows_its_duplicate() -> None:
    pool = BlockPool(num_blocks=6, block_size=1)
    run_together(pool, [1, 2], [1, 2, 3])
    pool.free(0)
    pool.free(1)  # its duplicates are free; 1 and 2 were used as recently as 5, which needs them
    pool.add("x")
    assert [pool.append("x")[0] for _ in range(5)] == [3, 4, 5, 2, 1]
