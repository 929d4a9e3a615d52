"""examples/sequence_blocks.py: the blocks of one batch, position by position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequence_blocks import SequenceBlocks

from compiled_attn.cache.blocks import BlockPool, OutOfBlocks


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=20, block_size=4)


def _mask(*finished: bool) -> torch.Tensor:
    return torch.tensor(finished)


def test_a_block_is_taken_only_where_the_last_one_is_full(pool):
    blocks = SequenceBlocks(pool, [3, 4, 8])
    blocks.update(_mask(False, False, False))
    assert blocks.lengths.tolist() == [4, 5, 9]
    assert blocks.block_table().tolist() == [[1, 0, 0], [2, 5, 0], [3, 4, 6]]


def test_a_finished_sequence_frees_its_blocks_and_becomes_padding(pool):
    blocks = SequenceBlocks(pool, [9, 4, 5])
    blocks.update(_mask(True, False, False))
    assert blocks.running.tolist() == [False, True, True]
    assert blocks.lengths.tolist() == [0, 5, 6]
    assert blocks.last_positions().tolist() == [0, 4, 5]
    assert blocks.block_table().tolist() == [[0, 0], [4, 1], [5, 6]]
    blocks.update(_mask(True, True, True))
    assert blocks.block_table().tolist() == [[0], [0], [0]]
    assert pool.stats().used == 0


def test_blocks_of_finished_sequences_serve_the_others():
    pool = BlockPool(num_blocks=4, block_size=2)
    blocks = SequenceBlocks(pool, [2, 4])
    assert pool.available == 0
    blocks.update(_mask(False, True))
    assert blocks.block_table().tolist() == [[1, 2], [0, 0]]


def _state(blocks: SequenceBlocks) -> tuple:
    rows = [each.tolist() for each in (blocks.lengths, blocks.running, blocks.block_table())]
    return rows, blocks.pool.stats(), blocks.pool.requests


@pytest.mark.parametrize("finished", [(False, False, False), (False, False, True)])
def test_an_update_without_room_leaves_the_batch_as_it_was(finished):
    pool = BlockPool(num_blocks=7, block_size=2)
    blocks = SequenceBlocks(pool, [4, 4, 1])
    pool.add("other")
    pool.reserve("other", 2)
    before = _state(blocks)
    with pytest.raises(OutOfBlocks, match="to hold 5 tokens"):
        blocks.update(_mask(*finished))
    assert _state(blocks) == before
    pool.free("other")
    blocks.update(_mask(False, False, True))
    assert blocks.lengths.tolist() == [5, 5, 0]


def test_tables_follow_moved_blocks(pool):
    blocks = SequenceBlocks(pool, [6, 4])
    pool.exchange([(3, 9)])
    assert blocks.block_table().tolist() == [[1, 2], [9, 0]]


def test_prompts_without_room_leave_the_pool_to_others(pool):
    pool.add("other")
    pool.reserve("other", 8)
    with pytest.raises(OutOfBlocks):
        SequenceBlocks(pool, [36, 36])
    assert pool.requests == ["other"]


@given(
    size=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    steps=st.lists(st.lists(st.booleans(), min_size=6, max_size=6)),
)
def test_every_position_has_a_block_of_its_own_whatever_finishes(size, lengths, steps):
    pool = BlockPool(2 + sum(-(-(n + len(steps)) // size) for n in lengths), size)
    blocks = SequenceBlocks(pool, lengths)
    expected = lengths
    for step in steps:
        finished = step[: len(lengths)]
        blocks.update(torch.tensor(finished))
        expected = [
            n + 1 if n and not end else 0 for n, end in zip(expected, finished, strict=True)
        ]
        assert blocks.lengths.tolist() == expected
        rows = zip(expected, blocks.block_table().tolist(), strict=True)
        held = [table[: -(-n // size)] for n, table in rows]
        used = [block for table in held for block in table]
        assert 0 not in used and len(set(used)) == len(used) == pool.stats().used
    blocks.free()
    assert pool.available == pool.num_blocks - 1
