"""The table of running requests makes the same step as request objects."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.step import BatchBuilder, Request, RequestTable, TableLayout
from tests.oracle import Scene


@given(st.integers(0, 2**32), st.integers(0, 5))
@settings(max_examples=30)
def test_rows_of_a_table_make_the_step_that_requests_make(seed, spare):
    scene = Scene(seed).random()
    made = [Request(r.tokens, r.context_len, r.block_table, 1) for r in scene.requests]
    table = RequestTable(len(made) + spare, 40)
    rows = [table.add(index, request.block_table) for index, request in enumerate(made)]
    builder = BatchBuilder(64, 4)
    by_rows = builder.plan_rows(
        table,
        rows,
        [r.context_len for r in made],
        [len(r.tokens) for r in made],
        np.concatenate([r.tokens for r in made]),
    )
    by_requests = builder.plan(made)
    assert by_rows.need == by_requests.need
    for one, other in zip(by_rows.fill(), by_requests.fill(), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_blocks_are_appended_and_rows_are_used_again():
    table = RequestTable(2, 4)
    row = table.add("a", [3])
    table.add("b")
    table.extend("a", [7, 5])
    assert table.blocks[row, :3].tolist() == [3, 7, 5] and table.lengths[row] == 3
    table.remove("a")
    assert "a" not in table and table.add("c", [9]) == row
    assert table.lengths[row] == 1


def test_a_step_needs_as_many_tokens_as_its_lengths_say():
    table = RequestTable(1, 4)
    row = table.add("a", [3])
    with pytest.raises(ValueError, match="2 tokens"):
        BatchBuilder(8, 4).plan_rows(table, [row], [0], [2], [1])
    with pytest.raises(ValueError, match="at least one request"):
        BatchBuilder(8, 4).plan_rows(table, [], [], [], [])


@pytest.mark.parametrize("short", ["context", "query", "logits", "is_prefill"])
def test_every_request_is_listed_in_every_array(short):
    table = RequestTable(2, 4)
    given = {"rows": [table.add("a", [3]), table.add("b", [4])], "tokens": [7, 8]}
    given |= {"context": [1, 1], "query": [1, 1], "logits": [1, 1], "is_prefill": [False, False]}
    with pytest.raises(ValueError, match="of 2 rows, got"):
        BatchBuilder(8, 4).plan_rows(table, **(given | {short: given[short][:1]}))


def test_arrays_that_a_plan_was_made_from_may_change_before_it_is_filled():
    table = RequestTable(2, 4)
    rows = np.array([table.add("a", [3]), table.add("b", [4, 5])])
    context, query, tokens = np.array([1, 5]), np.array([1, 2]), np.array([7, 8, 9])
    plan = BatchBuilder(8, 4).plan_rows(table, rows, context, query, tokens)
    for array in (rows, context, query, tokens):
        array += 1
    assert plan.fill().input_ids.tolist() == [7, 8, 9]
    metadata = plan.attention_metadata(4)
    assert metadata.seq_lens == [2, 7] and metadata.context_lens_tensor.tolist() == [1, 5]
    assert metadata.block_tables.tolist() == [[3, 0], [4, 5]]


def test_gaps_are_closed_in_order_and_what_is_behind_the_rows_is_null():
    table = RequestTable(4, 3)
    for name, blocks in (("a", [3, 1]), ("b", [4]), ("c", [5, 6, 2]), ("d", [7])):
        table.add(name, blocks)
    table.remove("a")
    table.remove("c")
    table.close_gaps()
    assert table.rows(["d", "b"]).tolist() == [1, 0] and table.num_free == 2
    assert table.blocks.tolist() == [[4, 0, 0], [7, 0, 0], [0] * 3, [0] * 3]
    assert table.lengths.tolist() == [1, 1, 0, 0]
    assert [table.add("e", [9]), table.add("f", [2])] == [2, 3]
    with pytest.raises(KeyError, match="add it first"):
        table.rows(["b", "a"])


@pytest.mark.parametrize("width", [3, 5])
def test_first_rows_are_read_in_place_where_they_may_be_and_equal_those_that_are_copied(width):
    def step(in_place: bool, order: list[int]) -> list[torch.Tensor]:
        table = RequestTable(4, 3, in_place=in_place)
        for name, blocks in enumerate(([3, 1], [4], [5, 6, 2])):
            table.add(name, blocks)
        context, new = [[6, 2, 9][row] for row in order], [1] * len(order)
        rows = BatchBuilder(8, 4).rows(table, order, context, new, order)
        batch = TableLayout(8, 4, width).plan(rows).fill({"tokens": 4, "requests": 4})
        is_shared = np.shares_memory(batch.block_tables.numpy(), table.blocks)
        assert is_shared == (in_place and width == 3 and order == sorted(order))
        return [*batch]

    for order in ([0, 1, 2], [2, 0, 1]):
        for one, other in zip(step(True, order), step(False, order), strict=True):
            assert torch.equal(one, other)


def test_a_row_whose_first_blocks_are_released_is_still_read_in_place():
    table = RequestTable(2, 4, in_place=True)
    table.add("a", [5, 3, 1])
    table.release("a", 2)
    table.add("b")
    table.release("b", 1)  # found in the prefix cache without its first block
    table.write("b", 1, [7])
    rows = BatchBuilder(8, 4, window=3).rows(table, [0, 1], [10, 6], [1, 1], [8, 9])
    step = TableLayout(8, 4, 4).plan(rows).fill()
    assert np.shares_memory(step.block_tables.numpy(), table.blocks)
    assert step.block_tables.tolist() == [[0, 0, 1, 0], [0, 7, 0, 0]]
    assert step.slot_mapping.tolist() == [4 + 2, 28 + 2]
    with pytest.raises(ValueError, match="at most 4 blocks"):
        table.release("b", 5)


def test_a_table_over_a_cache_of_one_block_is_read_in_place():
    table = RequestTable(1, 1, in_place=True)
    table.add("a", [1])
    assert table.in_place(np.array([0]), 2) is table.blocks


@pytest.mark.parametrize(
    ("new", "context", "prompt_len", "is_prefill"),
    [
        *[(1, 0, None, True), (1, 1, None, False), (2, 1, None, True)],
        *[(1, 4, 5, True), (1, 5, 5, False), (3, 5, 5, False)],
    ],
)
def test_a_request_is_in_its_prompt_until_all_of_it_is_context(
    new, context, prompt_len, is_prefill
):
    request = Request([1] * new, context, [1, 2], prompt_len=prompt_len)
    assert request.is_prefill == is_prefill


def test_a_table_with_an_id_that_no_cache_has_is_not_read_in_place():
    table = RequestTable(1, 3, in_place=True)
    table.add("a", [9, 3])
    rows = BatchBuilder(8, 4).rows(table, [0], [6], [1], [5])
    with pytest.raises(ValueError, match=r"block ids in 1\.\.7, got 1\.\.9"):
        TableLayout(8, 4, 3).plan(rows)


def test_bad_calls_change_nothing():
    table = RequestTable(1, 2)
    table.add("a", [3])
    before = table.blocks.copy(), table.lengths.copy()
    with pytest.raises(ValueError, match="'a' has a row"):
        table.add("a")
    with pytest.raises(ValueError, match="no free row"):
        table.add("b")
    with pytest.raises(ValueError, match="at most 2 blocks"):
        table.extend("a", [4, 5])
    with pytest.raises(KeyError, match="add it first"):
        table.remove("b")
    assert np.array_equal(table.blocks, before[0]) and np.array_equal(table.lengths, before[1])
    with pytest.raises(ValueError, match="at least 1"):
        RequestTable(0, 4)
