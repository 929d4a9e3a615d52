"""examples/sequence_blocks.py: the blocks of one batch, position by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequence_blocks import SequenceBlocks

from compiled_attn.cache.blocks import BlockPool, OutOfBlocks


def snapshot(blocks: SequenceBlocks) -> tuple[Any, ...]:
    """Everything that a failed call could have changed."""
    pool = blocks.pool
    tables = {name: list(pool.table(name).blocks) for name in pool.requests}
    state = blocks.lengths, blocks.running, blocks.block_table(), blocks.slots()
    return pool.stats(), pool.refcounts.tolist(), tables, [tensor.tolist() for tensor in state]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=20, block_size=4)


# Prompts


@pytest.mark.parametrize("length", range(1, 14))
def test_positions_and_fragmentation_are_exact_for_every_prompt_length(pool, length):
    blocks = SequenceBlocks(pool, [length])
    held = -(-length // 4)
    assert blocks.lengths.tolist() == [length]
    assert blocks.last_positions().tolist() == [length - 1]
    assert blocks.block_table().tolist() == [list(range(1, held + 1))]
    assert blocks.fragmented_bytes(10) == 10 * (4 * held - length)
    assert blocks.slots().tolist() == list(range(4, 4 + length))
    assert blocks.last_slots().tolist() == [4 + length - 1]
    assert pool.stats().used == held


def test_tables_of_a_batch_are_padded_with_the_null_block(pool):
    blocks = SequenceBlocks(pool, [9, 4, 5])
    assert blocks.block_table().tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert blocks.block_table(pad_to=5)[1].tolist() == [4, 0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"expected pad_to >= 3, .* got 2"):
        blocks.block_table(pad_to=2)


def test_tensors_have_the_dtypes_that_the_attention_calls_take(pool):
    blocks = SequenceBlocks(pool, [9, 4])
    for tensor in (blocks.block_table(), blocks.lengths, blocks.last_positions()):
        assert tensor.dtype == torch.int32
    for tensor in (blocks.slots(), blocks.last_slots()):
        assert tensor.dtype == torch.int64
    assert blocks.running.dtype == torch.bool


def test_tensors_are_on_the_device_of_the_batch(pool):
    blocks = SequenceBlocks(pool, [9, 4], device="meta")
    tensors = [blocks.block_table(), blocks.lengths, blocks.running, blocks.slots()]
    tensors += [blocks.last_positions(), blocks.last_slots()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(
    "lengths",
    [[5, 8], (5, 8), np.array([5, 8], np.uint8), torch.tensor([5, 8]), torch.tensor([5, 8]).int()],
    ids=["list", "tuple", "uint8 array", "int64 tensor", "int32 tensor"],
)
def test_prompt_lengths_may_be_any_integers(pool, lengths):
    assert SequenceBlocks(pool, lengths).lengths.tolist() == [5, 8]


def test_the_lengths_and_tensors_given_out_are_copies(pool):
    given = np.array([5, 8])
    blocks = SequenceBlocks(pool, given)
    before = snapshot(blocks)
    given[:] = 1
    for tensor in (blocks.lengths, blocks.running, blocks.block_table(), blocks.last_positions()):
        tensor.zero_()
    assert snapshot(blocks) == before


# Growing


def test_a_block_is_taken_only_where_the_last_one_is_full(pool):
    blocks = SequenceBlocks(pool, [3, 4, 8])
    blocks.update()
    assert blocks.lengths.tolist() == [4, 5, 9]
    assert blocks.block_table().tolist() == [[1, 0, 0], [2, 5, 0], [3, 4, 6]]
    assert blocks.fragmented_bytes(1) == 0 + 3 + 3
    blocks.update([False, False, False])
    assert blocks.block_table().tolist() == [[1, 7, 0], [2, 5, 0], [3, 4, 6]]
    assert blocks.last_slots().tolist() == [28, 21, 25]


def test_a_token_inside_of_a_block_makes_no_call_to_the_pool(pool, monkeypatch):
    blocks = SequenceBlocks(pool, [1] * 10)
    calls = []
    for name in ("add", "reserve", "append", "free", "table", "stats"):
        monkeypatch.setattr(pool, name, lambda *_, name=name: calls.append(name))
    for _ in range(3):
        blocks.update(torch.zeros(10, dtype=torch.bool))
    assert blocks.lengths.tolist() == [4] * 10
    assert calls == []


def test_a_table_grows_far_beyond_its_prompt():
    blocks = SequenceBlocks(BlockPool(num_blocks=200, block_size=1), [1, 2])
    for _ in range(90):
        blocks.update()
    assert blocks.lengths.tolist() == [91, 92]
    assert blocks.block_table().shape == (2, 92)
    assert len(set(blocks.slots().tolist())) == 183


# Finishing


def test_a_finished_sequence_gives_up_its_blocks_and_becomes_padding(pool):
    blocks = SequenceBlocks(pool, [9, 4, 5])
    blocks.update(torch.tensor([True, False, False]))
    assert blocks.running.tolist() == [False, True, True]
    assert blocks.lengths.tolist() == [0, 5, 6]
    assert blocks.last_positions().tolist() == [0, 4, 5]
    assert blocks.last_slots().tolist() == [0, 4, 25]
    assert blocks.block_table().tolist() == [[0, 0], [4, 1], [5, 6]]
    assert pool.stats().used == 4
    assert blocks.slots().tolist() == [16, 17, 18, 19, 4, 20, 21, 22, 23, 24, 25]


def test_what_a_mask_says_of_a_finished_sequence_is_ignored(pool):
    blocks = SequenceBlocks(pool, [9, 4])
    blocks.update([True, False])
    blocks.update([False, False])
    assert blocks.running.tolist() == [False, True]
    blocks.update([True, False])
    assert blocks.lengths.tolist() == [0, 7]
    assert pool.stats().used == 2


def test_a_batch_that_is_all_finished_holds_nothing_and_can_still_be_asked(pool):
    blocks = SequenceBlocks(pool, [9, 4])
    blocks.update(np.array([True, True]))
    assert not blocks.running.any()
    assert pool.stats().used == 0
    assert blocks.block_table().tolist() == [[0], [0]]
    assert blocks.slots().tolist() == []
    assert blocks.fragmented_bytes(8) == 0
    blocks.update()
    assert blocks.lengths.tolist() == [0, 0]
    blocks.free()


def test_blocks_of_the_finished_serve_those_that_go_on():
    pool = BlockPool(num_blocks=4, block_size=2)
    blocks = SequenceBlocks(pool, [2, 4])
    assert pool.available == 0
    blocks.update([False, True])
    assert blocks.block_table().tolist() == [[1, 2], [0, 0]]


def test_batches_and_requests_share_a_pool(pool):
    pool.add("other")
    pool.reserve("other", 6)
    first, second = SequenceBlocks(pool, [4]), SequenceBlocks(pool, [4])
    first.update()
    assert first.block_table().tolist() == [[3, 5]]
    first.free()
    second.update()
    assert second.block_table().tolist() == [[4, 3]]
    second.free()
    assert pool.requests == ["other"]
    assert pool.stats().used == 2


def test_tables_and_slots_follow_blocks_that_move(pool):
    blocks = SequenceBlocks(pool, [6, 4])
    pool.exchange([(3, 9)])
    assert blocks.block_table().tolist() == [[1, 2], [9, 0]]
    assert blocks.slots().tolist() == [4, 5, 6, 7, 8, 9, 36, 37, 38, 39]
    assert blocks.last_slots().tolist() == [9, 39]
    blocks.update()
    assert blocks.block_table().tolist() == [[1, 2], [9, 3]]


# Errors


def test_prompts_without_room_leave_the_pool_as_it_was(pool):
    pool.add("other")
    pool.reserve("other", 8)
    before = pool.stats()
    with pytest.raises(OutOfBlocks, match=r"needs 18 more blocks to hold 72 tokens, got 17 of 19"):
        SequenceBlocks(pool, [36, 36])
    assert pool.stats() == before
    assert pool.requests == ["other"]
    with pytest.raises(OutOfBlocks):
        SequenceBlocks(pool, [2**62] * 16)  # as int64, the sum of these is 0


def test_a_token_without_room_leaves_everything_as_it_was():
    pool = BlockPool(num_blocks=8, block_size=2)
    blocks = SequenceBlocks(pool, [4, 4, 3, 2])
    before = snapshot(blocks)
    with pytest.raises(OutOfBlocks, match=r"SequenceBlocks\(4 .* needs 3 more blocks") as caught:
        blocks.update()
    assert snapshot(blocks) == before
    assert (caught.value.needed, caught.value.free, caught.value.length) == (3, 0, 17)
    with pytest.raises(OutOfBlocks) as caught:
        blocks.update([False, False, False, True])  # one freed, two needed
    assert snapshot(blocks) == before
    assert (caught.value.needed, caught.value.free, caught.value.length) == (2, 1, 14)
    blocks.update([True, False, False, False])
    assert blocks.lengths.tolist() == [0, 5, 4, 3]


USES: dict[str, Callable[[SequenceBlocks], object]] = {
    "update": lambda blocks: blocks.update([True, False]),
    "block_table": lambda blocks: blocks.block_table(),
    "last_positions": lambda blocks: blocks.last_positions(),
    "last_slots": lambda blocks: blocks.last_slots(),
    "slots": lambda blocks: blocks.slots(),
    "fragmented_bytes": lambda blocks: blocks.fragmented_bytes(4),
    "lengths": lambda blocks: blocks.lengths,
    "running": lambda blocks: blocks.running,
    "free": lambda blocks: blocks.free(),
}


@pytest.mark.parametrize("use", USES)
def test_any_use_after_free_is_an_error_and_changes_nothing(pool, use):
    blocks = SequenceBlocks(pool, [5, 6])
    blocks.free()
    assert (pool.stats().used, pool.requests) == (0, [])
    pool.add("next")
    pool.reserve("next", 6)
    before = pool.stats()
    with pytest.raises(RuntimeError, match=r"holds blocks, got SequenceBlocks\(2 .* freed"):
        USES[use](blocks)
    assert pool.stats() == before


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([True], ValueError, r"shape \[2\], .* got \[1\]"),
        ([[True, False]], ValueError, r"shape \[2\], .* got \[1, 2\]"),
        (True, ValueError, r"shape \[2\], .* got \[\]"),
        ([1, 0], TypeError, r"bools, got int64"),
        (torch.tensor([1, 0]), TypeError, r"bools, got int64"),
        (torch.tensor([1.0, 0.0]), TypeError, r"got torch.float32"),
    ],
)
def test_a_wrong_mask_is_refused_and_changes_nothing(pool, mask, error, message):
    blocks = SequenceBlocks(pool, [4, 4])
    before = snapshot(blocks)
    with pytest.raises(error, match=message):
        blocks.update(mask)
    assert snapshot(blocks) == before


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([], ValueError, r"B >= 1, got \[0\]"),
        ([[1, 2], [3, 4]], ValueError, r"\[B\] .* got \[2, 2\]"),
        (5, ValueError, r"\[B\] .* got \[\]"),
        ([5, 0], ValueError, "got 0 for prompt 1"),
        ([-1, 5], ValueError, "got -1 for prompt 0"),
        ([1.5], TypeError, "got float64"),
        ([True], TypeError, "got bool"),
        (["a"], TypeError, "got <U1"),
        (torch.tensor([2.0]), TypeError, r"got torch.float32"),
    ],
)
def test_wrong_lengths_are_refused_and_nothing_is_held(pool, lengths, error, message):
    with pytest.raises(error, match=message):
        SequenceBlocks(pool, lengths)
    assert (pool.stats().used, pool.requests) == (0, [])


# Against a model


class Memory:
    """Slots of a cache with the position and row that were written there last."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.slots = np.full((pool.num_blocks, pool.block_size, 2), -1)

    def write(self, slots: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        self.slots.reshape(-1, 2)[slots.numpy()] = np.stack([rows, positions], -1)

    def swap(self, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.slots[[source, destination]] = self.slots[[destination, source]]
        self.pool.exchange(pairs)

    def expect(self, blocks: SequenceBlocks, lengths: list[int]) -> None:
        """Every position of every row is where the table, and the slots, say that it is."""
        assert blocks.lengths.tolist() == lengths
        written = self.slots.reshape(-1, 2)[blocks.slots().numpy()].tolist()
        assert written == [[row, p] for row, n in enumerate(lengths) for p in range(n)]
        for row, (length, table) in enumerate(zip(lengths, blocks.block_table(), strict=True)):
            held = -(-length // self.pool.block_size)
            positions = self.slots[table[:held]].reshape(-1, 2)[:length, 1]
            assert positions.tolist() == list(range(length)), row
            assert (table[:held] > 0).all()
            assert not table[held:].any()


@given(
    size=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    steps=st.lists(st.tuples(st.lists(st.booleans(), min_size=6, max_size=6), st.booleans())),
    spare=st.integers(0, 12),
)
def test_no_position_is_lost_whatever_finishes_and_moves(size, lengths, steps, spare):
    held = sum(-(-n // size) for n in lengths)
    pool = BlockPool(held + spare + 2, size)
    memory = Memory(pool)
    blocks = SequenceBlocks(pool, lengths)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    memory.write(blocks.slots(), rows, np.concatenate([np.arange(n) for n in lengths]))
    model = list(lengths)
    for mask, moves in steps:
        ends = mask[: len(model)]
        wanted = [n + 1 if n and not end else 0 for n, end in zip(model, ends, strict=True)]
        needed = sum(-(-n // size) for n in wanted)
        if needed > pool.num_blocks - 1:
            with pytest.raises(OutOfBlocks):
                blocks.update(ends)
        else:
            blocks.update(ends)
            model = wanted
            running = blocks.running.numpy().nonzero()[0]
            memory.write(
                blocks.last_slots()[running], running, blocks.last_positions()[running].numpy()
            )
        if moves:
            memory.swap(pool.compaction(3))
        memory.expect(blocks, model)
        used = sum(-(-n // size) for n in model)
        assert pool.stats().used == used
        assert blocks.fragmented_bytes(3) == 3 * (used * size - sum(model))
    blocks.free()
    assert pool.available == pool.num_blocks - 1
