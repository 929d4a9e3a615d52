"""Forks in a pool, and the copies that writing into a shared block takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiled_attn.cache.blocks import BlockPool, OutOfBlocks
from tests.compiled_attn.cache.blocks.pools import perform_copies, run
from tests.compiled_attn.state import state_of


def test_a_fork_shares_all_blocks_until_one_of_both_writes() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    parent = run(pool, "p", list(range(6)))
    child = pool.fork("p", "c")
    assert child.blocks == parent.blocks == [1, 2]
    assert (child.length, child.num_computed, child.num_cached_tokens) == (6, 6, 0)
    assert pool.refcounts[:3].tolist() == [0, 2, 2]
    assert perform_copies(pool) == []
    assert pool.append("c") == [3]
    assert (parent.blocks, child.blocks) == ([1, 2], [1, 3])
    assert child.array[:2].tolist() == [1, 3]
    assert perform_copies(pool) == [(2, 3)]
    assert perform_copies(pool) == []
    assert pool.append("p") == []  # alone in block 2 by now
    assert pool.stats().copies == 1


def test_the_parent_copies_where_it_writes_first() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    parent = run(pool, "p", list(range(6)))
    child = pool.fork("p", "c")
    assert pool.append("p", 3) == [3, 4]
    assert (parent.blocks, child.blocks) == ([1, 3, 4], [1, 2])
    assert pool.append("c") == []
    assert perform_copies(pool) == [(2, 3)]


def test_a_full_last_block_is_never_copied() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    run(pool, "p", list(range(8)))
    child = pool.fork("p", "c")
    assert pool.append("c") == [3] and pool.append("p") == [4]
    assert child.blocks == [1, 2, 3]
    assert perform_copies(pool) == []


def test_the_children_of_a_fork_have_their_own_chains() -> None:
    pool = BlockPool(num_blocks=20, block_size=2)
    run(pool, "p", [1, 2, 3])
    pool.fork("p", "c")
    for name, token in (("p", 4), ("c", 5)):
        pool.append(name)
        perform_copies(pool)
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
    assert perform_copies(pool) == [(1, 2), (1, 3)]


def test_the_source_of_a_pending_copy_stays_until_the_copy_is_popped() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    run(pool, "p", [1, 2])
    pool.fork("p", "c")
    pool.append("c")
    pool.free("p")
    pool.add("x")
    assert pool.reserve("x", 4) == [3]
    assert not pool.can_reserve("x", 5)
    assert perform_copies(pool) == [(1, 2)]
    assert pool.reserve("x", 5) == [1]


def test_a_pending_copy_does_not_make_its_source_look_shared() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    run(pool, "p", [1, 2])
    pool.fork("p", "c")
    pool.append("c")
    assert pool.append("p") == []
    assert perform_copies(pool) == [(1, 2)]


def test_freeing_the_destination_cancels_the_copy() -> None:
    pool = BlockPool(num_blocks=9, block_size=4)
    run(pool, "p", [1, 2])
    pool.fork("p", "c")
    pool.append("c")
    pool.free("c")
    assert pool.refcounts[:3].tolist() == [0, 1, 0]
    assert perform_copies(pool) == []


def test_committing_a_block_whose_copy_was_not_taken_is_an_error_that_changes_nothing() -> None:
    pool = BlockPool(num_blocks=9, block_size=2)
    run(pool, "p", [1])
    pool.fork("p", "c")
    pool.append("c")
    before = state_of(pool)
    with pytest.raises(RuntimeError, match=r"request 'c' .*got blocks \[2\] waiting"):
        pool.commit("c", [1, 2], 2)
    assert state_of(pool) == before
    perform_copies(pool)
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


def test_a_copy_on_write_counts_when_the_pool_runs_out() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    run(pool, "p", [1, 2, 3])
    pool.fork("p", "c")
    before = state_of(pool)
    assert not pool.can_reserve("c", 4)
    with pytest.raises(OutOfBlocks, match=r"request 'c' needs 1 more blocks to hold 4 tokens"):
        pool.append("c")
    assert state_of(pool) == before
