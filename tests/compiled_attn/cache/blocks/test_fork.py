"""Forks in a pool, and the copies that writing into a shared block takes."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_attn.cache.blocks import BlockPool
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


def forked(children: int = 1) -> BlockPool:
    """Children of one request, each waiting for a copy of its half filled block 2."""
    pool = BlockPool(num_blocks=20, block_size=2)
    run(pool, "a", [1, 2, 3])
    for number in range(children):
        pool.fork("a", f"child {number}")
        pool.append(f"child {number}")
    return pool


def test_copies_stay_pending_until_copied_is_called() -> None:
    pool = forked()
    before = state_of(pool)
    assert pool.pending_copies() == pool.pending_copies() == [(2, 3)]
    assert state_of(pool) == before  # looking at them changed nothing
    with pytest.raises(RuntimeError, match=r"got blocks \[3\] waiting.*copied\(\)"):
        pool.commit("child 0", [1, 2, 3, 4], 4)
    pool.copied(pool.pending_copies())
    assert pool.pending_copies() == [] and pool.refcounts[2] == 1
    pool.commit("child 0", [1, 2, 3, 4], 4)


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
