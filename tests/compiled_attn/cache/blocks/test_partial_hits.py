"""Prompts that share the beginning of a block: by a copy of it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from compiled_attn.cache.blocks import BlockPool, OutOfBlocks
from tests.compiled_attn.cache.blocks.pools import perform_copies, run
from tests.compiled_attn.state import state_of

KEY = b"equal digests in all pools"


def pool_of(num_blocks: int = 20, block_size: int = 8, least: int | None = 2) -> BlockPool:
    return BlockPool(num_blocks, block_size, partial_hits=True, min_partial_tokens=least, key=KEY)


def found(pool: BlockPool, tokens: list[int], salt: str | None = None) -> int:
    """How many tokens a request would find; nothing is left of it."""
    cached = pool.add("probe", tokens, salt=salt).num_cached_tokens
    pool.free("probe")
    return cached


ABC = list(range(100, 116))  # two blocks of 8


def test_a_prompt_that_leaves_a_full_block_midway_gets_a_copy_of_it() -> None:
    pool = pool_of()
    first = run(pool, "a", [*ABC, 1])
    table = pool.add("b", [*ABC[:13], 2, 3, 4, 5])
    assert first.blocks == [1, 2, 3] and table.blocks == [1, 4]
    assert (table.length, table.num_computed, table.num_cached_tokens) == (13, 13, 13)
    assert table.array[:2].tolist() == [1, 4]
    assert pool.refcounts[:5].tolist() == [0, 2, 2, 1, 1]  # block 2: its table and the copy
    assert perform_copies(pool) == [(2, 4)]
    assert pool.refcounts[:5].tolist() == [0, 2, 1, 1, 1]
    stats = pool.stats()
    assert (stats.hit_tokens, stats.partial_hit_tokens, stats.copies) == (13, 5, 1)


def test_a_partly_filled_block_is_shared_as_far_as_it_was_committed() -> None:
    pool = pool_of()
    pool.add("a")
    pool.reserve("a", 16)
    pool.commit("a", ABC, 13)  # positions 13 .. 15 hold nothing yet
    assert found(pool, [*ABC, 1]) == 13
    assert found(pool, [*ABC[:11], 1, 1, 1]) == 11
    pool.commit("a", ABC, 15)
    assert found(pool, [*ABC, 1]) == 15


@pytest.mark.parametrize("end", ["free", "preempt"])
def test_the_last_block_of_a_finished_request_is_found_again(end: str) -> None:
    pool = pool_of()
    run(pool, "a", ABC[:13])
    getattr(pool, end)("a")
    assert (pool.stats().cached, pool.stats().free) == (2, 17)
    table = pool.add("a", ABC)
    assert (table.num_cached_tokens, table.blocks) == (13, [1, 3])
    assert perform_copies(pool) == [(2, 3)]


def test_a_block_that_is_being_filled_is_found_in_steps_of_the_least_match() -> None:
    pool = pool_of(least=3)
    pool.add("a")
    seen = []
    for length in range(1, 9):
        pool.append("a")
        pool.commit("a", ABC, length)
        seen.append(found(pool, ABC))
    assert seen == [0, 0, 3, 3, 3, 6, 6, 8]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    pool = pool_of()
    run(pool, "a", ABC)
    assert found(pool, ABC) == 15
    assert found(pool, ABC[:12]) == 11
    assert found(pool, ABC[:11]) == 10
    assert found(pool, ABC[:10]) == 8  # one token more is not worth a copy
    run(pool, "b", [7, 7, 7, 7])
    assert found(pool, [7, 7, 7, 7]) == 3


def test_a_match_must_be_worth_a_copy() -> None:
    for size, least, default in ((16, None, 4), (8, None, 2), (3, None, 1), (16, 9, 9)):
        pool = pool_of(block_size=size, least=least)
        run(pool, "a", list(range(size)))
        for count in range(size):
            expected = count if count >= default else 0
            assert found(pool, [*range(count), -1, -1]) == expected


def test_of_all_blocks_the_one_with_most_in_common_is_copied() -> None:
    pool = pool_of(num_blocks=40)
    for number in range(8):
        run(pool, f"r{number}", [*ABC[:number], *[number] * (8 - number)])
    for number in range(2, 6):
        table = pool.add(("x", number), [*ABC[:number], *[number] * 2, -1, -1])
        assert table.num_cached_tokens == number + 2
        assert perform_copies(pool) == [(pool.table(f"r{number}").blocks[0], table.blocks[0])]


def test_salts_keep_parts_of_blocks_apart() -> None:
    pool = pool_of()
    run(pool, "a", ABC[:13], salt="x")
    assert found(pool, ABC) == found(pool, ABC, salt="y") == 0
    assert found(pool, ABC, salt="x") == 13


def test_equal_tokens_after_another_prefix_are_not_shared() -> None:
    pool = pool_of()
    run(pool, "a", ABC)
    assert found(pool, [*ABC[8:], *ABC[8:]]) == 0
    assert found(pool, [*ABC[:8], *ABC[:8]]) == 8


def test_the_part_of_a_withdrawn_block_is_not_found_any_more() -> None:
    pool = BlockPool(num_blocks=20, block_size=8, partial_hits=True)
    tokens = list(range(16))
    pool.add("a", tokens)
    pool.reserve("a", 16)
    pool.commit("a", tokens, 12)
    assert pool.add("b", tokens).num_cached_tokens == 12
    pool.free("b")
    pool.withdraw("a")
    assert pool.add("c", tokens).num_cached_tokens == 0
    pool.free("c")
    pool.free("a")
    assert pool.stats().cached == 0


def test_by_default_only_full_blocks_are_found() -> None:
    pool = BlockPool(20, 8)
    run(pool, "a", ABC[:13])
    assert found(pool, ABC) == 8
    pool.free("a")
    assert (pool.stats().cached, pool.stats().copies) == (1, 0)


@pytest.mark.parametrize("least", [0, -1, 8, 9])
def test_a_least_match_that_is_no_part_of_a_block_is_refused(least: int) -> None:
    with pytest.raises(ValueError, match=rf"expected min_partial_tokens .*got {least}"):
        pool_of(least=least)


def test_blocks_of_one_token_have_no_parts() -> None:
    pool = pool_of(block_size=1, least=None)
    run(pool, "a", ABC)
    assert found(pool, ABC) == 15 and pool.stats().copies == 0


def test_the_chain_goes_on_after_a_partial_hit() -> None:
    pool = pool_of()
    run(pool, "a", [*ABC, 1])
    tokens = [*ABC[:13], *range(10)]
    table = run(pool, "b", tokens)
    other = pool.add("c", [*tokens, 5, 5])
    assert other.blocks[:2] == table.blocks[:2] == [1, 4]
    assert other.num_cached_tokens == 23
    # The same from a pool that has nothing in common but the tokens: the keys are equal.
    plain = BlockPool(20, 8, key=KEY)
    run(plain, "b", tokens)
    assert plain._index.match(tokens) == [1, 2]
    keys = [plain._index._key_of[block] for block in (1, 2)]
    assert [pool._index._key_of[block] for block in (1, 4)] == keys


def test_writing_before_the_copy_is_an_error_that_changes_nothing() -> None:
    pool = pool_of()
    run(pool, "a", ABC)
    pool.add("b", ABC)
    pool.reserve("b", 16)
    before = state_of(pool)
    with pytest.raises(RuntimeError, match=r"request 'b' .*got blocks \[3\] waiting"):
        pool.commit("b", ABC, 16)
    assert state_of(pool) == before
    perform_copies(pool)
    pool.commit("b", ABC, 16)


def test_the_owner_writes_on_into_a_block_that_others_copy() -> None:
    pool = pool_of()
    table = run(pool, "a", ABC[:13])
    pool.add("b", ABC)
    assert pool.append("a", 3) == []
    assert table.blocks == [1, 2]
    pool.commit("a", [*ABC[:13], 9, 9, 9], 16)
    assert perform_copies(pool) == [(2, 3)]


def test_a_fork_of_a_request_that_waits_for_its_copy_reads_the_same_source() -> None:
    pool = pool_of()
    run(pool, "a", ABC)
    pool.add("b", ABC)
    pool.fork("b", "c")
    assert pool.append("b") == [4]
    assert perform_copies(pool) == [(2, 3), (2, 4)]


def test_a_fork_that_is_behind_does_not_make_a_twin_findable() -> None:
    pool = pool_of()
    run(pool, "a", ABC[:8])  # block 1
    pool.add("b", [7])
    pool.reserve("b", 8)  # block 2
    pool.fork("b", "c")
    pool.commit("b", ABC[:8], 8)  # has come to the content of block 1
    pool.commit("c", ABC[:8], 5)
    assert pool._index.longest(ABC[:5])[2:] == (1, 5)
    for name in "abc":
        pool.free(name)
    assert (pool.stats().cached, pool.stats().free) == (1, 18)


def test_many_requests_copy_one_block() -> None:
    pool = pool_of()
    run(pool, "a", ABC)
    for name in "bcd":
        pool.add(name, ABC)
    assert pool.refcounts[2] == 4
    assert perform_copies(pool) == [(2, 3), (2, 4), (2, 5)]
    assert pool.refcounts[2] == 1


def test_freeing_a_request_undoes_its_partial_hit() -> None:
    pool = pool_of()
    run(pool, "a", ABC)
    before = state_of(pool)
    pool.add("b", [*ABC[:13], 1, 1])
    pool.free("b")
    counters = {"_queried_tokens", "_hit_tokens", "_partial_hit_tokens", "num_copies"}
    assert changed(before, state_of(pool)) == {
        *counters,
        "num_allocations",
        "peak_used",
        "high_water",
    }
    assert perform_copies(pool) == []


def changed(before: Any, after: Any) -> set[str]:
    """Names of the attributes below an object that differ."""
    if before == after:
        return set()
    names = set[str]()
    for (name, old), (_, new) in zip(before[1], after[1], strict=True):
        if old != new:
            is_object = isinstance(old, tuple) and isinstance(old[1], list)
            names |= changed(old, new) if is_object else {name}
    return names


def test_a_cached_source_is_cached_again_once_its_copy_is_popped_or_given_up() -> None:
    for give_up in (False, True):
        pool = pool_of()
        run(pool, "a", ABC)
        pool.free("a")
        pool.add("b", ABC)
        assert pool.refcounts[:4].tolist() == [0, 1, 1, 1]
        assert pool.stats().cached == 0
        if give_up:
            pool.free("b")
        assert perform_copies(pool) == ([] if give_up else [(2, 3)])
        assert pool.refcounts[2] == 0 and pool.stats().cached == (2 if give_up else 1)
        assert found(pool, ABC) == 15


def test_a_pinned_source_is_not_evicted_before_its_copy_is_popped() -> None:
    pool = pool_of(num_blocks=6)
    run(pool, "a", ABC)
    pool.free("a")
    pool.add("b", ABC)  # shares block 1, copies block 2 into block 3
    pool.add("x")
    assert pool.reserve("x", 16) == [4, 5]
    with pytest.raises(OutOfBlocks):
        pool.append("x")
    assert perform_copies(pool) == [(2, 3)]
    assert pool.append("x") == [2]


def test_an_evicted_source_is_not_found_any_more() -> None:
    pool = pool_of(num_blocks=4)
    run(pool, "a", ABC[:13])
    pool.free("a")
    pool.add("x")
    assert pool.reserve("x", 16) == [3, 2]
    pool.free("x")
    assert found(pool, ABC) == 8


def test_without_a_free_block_there_is_no_partial_hit() -> None:
    pool = pool_of(num_blocks=3)
    run(pool, "a", ABC)
    table = pool.add("b", ABC)
    assert (table.num_cached_tokens, table.blocks, perform_copies(pool)) == (8, [1], [])
    assert pool.stats().partial_hit_tokens == 0


def test_the_source_is_not_evicted_for_its_own_copy() -> None:
    pool = pool_of(num_blocks=3)
    run(pool, "a", ABC)
    pool.free("a")
    table = pool.add("b", ABC)
    assert (table.num_cached_tokens, pool.stats().cached) == (8, 1)
    assert pool.reserve("b", 16) == [2]


def test_where_one_block_is_missing_the_request_takes_over_what_it_would_copy() -> None:
    pool = pool_of(num_blocks=5)
    run(pool, "a", ABC)
    pool.free("a")
    prompt = [*ABC[:13], *range(19)]  # 32 tokens, all blocks of the pool
    assert pool.can_allocate(32, prompt) and not pool.can_allocate(33, prompt)
    table = pool.add("b", prompt)
    assert (table.blocks, pool.available) == ([1, 3], 1)  # block 2 is pinned
    assert pool.can_reserve("b", 32) and not pool.can_reserve("b", 33)
    before = state_of(pool)
    with pytest.raises(OutOfBlocks, match="request 'b' needs 3 more blocks to hold 33 tokens"):
        pool.reserve("b", 33)
    assert state_of(pool) == before
    assert pool.reserve("b", 32) == [2, 3, 4]  # its content lies in block 2, uncopied
    assert table.blocks == table.array[:4].tolist() == [1, 2, 3, 4]
    assert perform_copies(pool) == [] and pool.stats().evictions == 1
    pool.commit("b", prompt, 32)
    assert pool._index.match(prompt) == [1, 2, 3, 4]
    pool.free("b")
    assert (pool.stats().cached, pool.refcounts.any()) == (4, False)


def test_a_source_that_somebody_else_holds_or_copies_is_not_taken_over() -> None:
    for other in ("holds", "copies"):
        pool = pool_of(num_blocks=6)
        run(pool, "a", ABC)
        if other == "copies":
            pool.free("a")
            pool.add("c", ABC)
        table = pool.add("b", ABC)
        rest = (len(table.blocks) + pool.available) * 8
        assert pool.can_reserve("b", rest) and not pool.can_reserve("b", rest + 1)
        assert 2 not in pool.reserve("b", rest)


@pytest.mark.parametrize("seed", range(4))
def test_whether_a_request_fits_is_answered_as_without_partial_hits(seed: int) -> None:
    """A full pool, over and over: admission never depends on what is found in part."""
    rng = random.Random(seed)
    pool = pool_of(num_blocks=9, block_size=4, least=1)
    partial = 0
    for number in range(300):
        prompt = [0] * rng.randrange(20) + rng.choices((0, 1), k=rng.randrange(1, 12))
        length = len(prompt) + rng.randrange(8)
        fits = pool.can_allocate(length, prompt)
        assert pool.requests or fits == (length <= 8 * 4)
        partial += pool.add(number, prompt).num_cached_tokens % 4 > 0
        assert pool.can_reserve(number, length) == fits
        if fits:
            pool.reserve(number, length)
            perform_copies(pool)
            pool.commit(number, prompt, len(prompt))
        for name in pool.requests[: rng.randrange(3)]:
            pool.free(name)
    assert partial > 20 and pool.stats().evictions > 100
