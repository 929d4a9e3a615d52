"""Steps request by request: their ladder, and what a step may read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiled_attn import BatchBuilder, Request
from compiled_attn.step import (
    PartsLayout,
    RequestTable,
    StateTableBatch,
    StepLimits,
    TableBatch,
    TableLayout,
)

LAYOUT = TableLayout(2, 32)
LIMITS = StepLimits(256, 32, 100, 1000)
ALL = [(n, n) for n in (1, 2, 4, 8, 16, 32)] + [(n, 32) for n in (64, 128, 256)]


def test_the_ladder_doubles_decodes_and_then_tokens():
    assert sorted(bucket.sizes for bucket in LAYOUT.ladder(LIMITS, 24)) == ALL


def test_where_one_compile_serves_all_steps_of_few_requests_are_finer():
    shapes = sorted(bucket.sizes for bucket in LAYOUT.ladder(LIMITS, 24, one_compile=True))
    assert shapes == sorted(ALL + [(n, 8) for n in (48, 64, 96, 128, 192, 256)])


def test_where_all_requests_are_few_their_steps_are_finer():
    limits = StepLimits(64, 4, 9, 99)
    shapes = {bucket.sizes for bucket in LAYOUT.ladder(limits, 24, one_compile=True)}
    assert shapes == {(1, 1), (2, 2), *((n, 4) for n in (4, 6, 8, 12, 16, 24, 32, 48, 64))}


def test_a_budget_keeps_all_requests_before_few():
    shapes = [bucket.sizes for bucket in LAYOUT.ladder(LIMITS, 11, one_compile=True)]
    assert sorted(shapes) == sorted([*ALL, (256, 8), (192, 8)])


@pytest.mark.parametrize("limits", [(256, 32), (24, 5), (6, 5), (10, 9), (7, 7), (1, 1), (100, 1)])
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 24])
@pytest.mark.parametrize("one_compile", [False, True])
def test_the_budget_is_kept_and_the_largest_step_has_a_bucket(limits, budget, one_compile):
    tokens, seqs = limits
    space = LAYOUT.ladder(StepLimits(tokens, seqs, 10, 100), budget, one_compile=one_compile)
    assert len(space) <= budget
    assert all(size >= requests for size, requests in (bucket.sizes for bucket in space))
    assert space.pick(tokens=tokens, requests=seqs) is not None


def test_steps_with_drafts_have_buckets_of_a_row_for_each_token():
    space = LAYOUT.ladder(StepLimits(256, 8, 100, 1000, draft=4), 24)
    rows = sorted(size for size, requests in (bucket.sizes for bucket in space) if size == requests)
    assert rows == [1, 2, 4, 5, 8, 10, 16, 20, 32, 40]
    assert space.pick(tokens=256, requests=8) is not None
    for draft in range(17):
        many = LAYOUT.ladder(StepLimits(64, 32, 100, 1000, draft), 24)
        assert many.largest.sizes == (64, 64 if draft else 32)


@pytest.mark.parametrize("bad", [0, -1, 8])
def test_a_block_that_is_read_must_be_one_of_the_cache(bad):
    with pytest.raises(ValueError, match=r"block ids in 1\.\.7, got"):
        BatchBuilder(8, 4).plan_tables([Request([1], 6, [bad, 3])])


@pytest.mark.parametrize("plan", ["plan", "plan_tables"])
def test_blocks_before_a_window_may_be_null_and_others_may_not(plan):
    requests = [Request([1, 2], 9, [0, 0, 5]), Request([3], 5, [0, 6]), Request([4], 4, [2, 3])]
    planned = getattr(BatchBuilder(8, 4, window=2), plan)(requests)
    step = planned.fill()
    if plan == "plan":  # as if each request began at the block that it reads first
        later = [Request([1, 2], 1, [5]), Request([3], 1, [6]), Request([4], 4, [2, 3])]
        other = BatchBuilder(8, 4).plan(later).fill()
        assert planned.need == {"tokens": 4, "shared": 1, "unique": 3, "logits": 3}
        assert step.unique_blocks.tolist() == other.unique_blocks.tolist() == [6, 2, 3]
        assert step.unique_starts.tolist() == [4, 0, 4] and step.shared_starts.tolist() == [8]
        assert step.unique_usage.tolist() == other.unique_usage.tolist() == [2, 4, 1]
    else:
        assert step.block_tables.tolist() == [[0, 0, 5], [0, 6, 0], [2, 3, 0]]
        with pytest.raises(ValueError, match=r"block ids in 1\.\.7, got -1"):
            BatchBuilder(8, 4, window=2).plan_tables([Request([1], 9, [0, -1, 5])])
    with pytest.raises(ValueError, match=r"block ids in 1\.\.7, got 0"):
        getattr(BatchBuilder(8, 4, window=3), plan)([Request([1], 8, [0, 0, 5])])


def test_entries_behind_the_blocks_that_are_read_are_ignored():
    step = BatchBuilder(8, 4).plan_tables([Request([1], 6, [2, 3, -1, 99])]).fill()
    assert step.block_tables.tolist() == [[2, 3]]


def test_a_form_of_a_fixed_width_fills_tables_of_it():
    layout, builder = TableLayout(8, 4, width=5), BatchBuilder(8, 4)
    plan = layout.plan(builder.rows_of([Request([1], 6, [2, 3]), Request([5, 6], 0, [4])]))
    step = plan.fill({"tokens": 4, "requests": 3})
    assert step.block_tables.tolist() == [[2, 3, 0, 0, 0], [4, 0, 0, 0, 0], [0] * 5]
    assert np.diff(step.query_start_loc).tolist() == [1, 2, 0]
    assert layout.padding({"tokens": 4, "requests": 3})[4].shape == step.block_tables.shape
    with pytest.raises(ValueError, match="pass width="):
        TableLayout(8, 4).padding({"tokens": 4, "requests": 3})


def test_rows_that_need_logits_become_requests_that_see_what_their_tokens_do():
    chunk = Request([8], 0, [5], num_logits=0)
    requests = [Request([1], 6, [2, 3]), chunk, Request([5, 6, 7], 1, [4], num_logits=2)]
    metadata = BatchBuilder(8, 4).plan_tables(requests).fill().logits_metadata(4)
    assert metadata.positions.tolist() == [6, 2, 3]
    assert metadata.seq_lens.tolist() == [7, 3, 4]
    assert metadata.block_tables.tolist() == [[2, 3], [4, 0], [4, 0]]
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 3]
    assert not metadata.slot_mapping.any()


@pytest.mark.parametrize("context", [0, 6])
def test_padded_rows_that_need_logits_see_nothing(context):
    plan = BatchBuilder(8, 4).plan_tables([Request([1], context, [2, 3])])
    metadata = plan.fill({"tokens": 2, "requests": 4}).logits_metadata(4)
    assert metadata.seq_lens.tolist() == [context + 1, 0, 0, 0]
    padding = TableBatch.padding({"tokens": 2, "requests": 3}, 5).logits_metadata(4)
    assert padding.seq_lens.tolist() == [0, 0, 0] and not padding.block_tables.any()


@pytest.mark.parametrize("kind", [TableLayout, PartsLayout])
@pytest.mark.parametrize("blocks", [1, 3])
def test_the_smallest_need_is_that_of_the_last_token_of_a_request_of_so_many_blocks(kind, blocks):
    layout = kind(2, 2).over(8, 4, 3)  # the same layout, of another cache
    rows = BatchBuilder(8, 4).rows_of([Request([1], 4 * blocks - 1, range(7, 7 - blocks, -1))])
    assert layout.plan(rows).need == layout.smallest_need(blocks)


def test_only_a_layout_with_states_has_their_slots_in_its_batches():
    requests = [Request([1], 6, [2, 3], state_slot=4), Request([5, 6], 0, [4], state_slot=1)]
    rows, bucket = BatchBuilder(8, 4).rows_of(requests), {"tokens": 4, "requests": 3}
    plain, stateful = (TableLayout(8, 4, 5, has_states=each) for each in (False, True))
    without, step = (each.plan(rows).fill(bucket) for each in (plain, stateful))
    assert type(without) is TableBatch and len(without) == 7
    assert all(map(torch.equal, step, without))
    assert step.state_slots.tolist() == [4, 1, 0] and step.state_slots.dtype == torch.int32
    assert plain.metadata(without, 4).state_slots is None
    metadata = stateful.metadata(stateful.batch([*step]), 4)
    assert metadata.state_slots is step.state_slots and metadata.seq_lens is step.seq_lens
    assert stateful.logits_metadata(step, 4).state_slots is None
    padding = stateful.padding(bucket)
    assert [each.shape for each in padding] == [each.shape for each in step]
    assert type(padding) is StateTableBatch and not any(each.any() for each in padding)
    assert stateful.over(9, 2, 3) == TableLayout(9, 2, 3, has_states=True)


def test_rows_of_a_table_carry_the_slots_of_their_requests_through_gaps():
    table = RequestTable(3, 3, in_place=True)
    for name, slot in (("a", 3), ("b", 1), ("c", 2)):
        table.add(name, [slot], slot)
    table.remove("b")
    table.close_gaps()
    table.add("d", [5], 7)
    rows = BatchBuilder(8, 4).rows(table, table.rows("acd"), [1] * 3, [1] * 3, [1] * 3)
    step = TableLayout(8, 4, 3, has_states=True).plan(rows).fill({"tokens": 4, "requests": 4})
    assert step.state_slots.tolist() == [3, 2, 7, 0]
    table.remove("d")
    table.add("e", [6])
    assert table.state_slots[table.row("e")] == 0
