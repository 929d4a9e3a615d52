"""The batch builder: what a step needs, what it is padded with, what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn import BatchBuilder, Request, StepBatch
from compiled_attn.step import TableBatch
from tests.oracle import Scene


def _decode(context: int, blocks: list[int]) -> Request:
    return Request([7], context, blocks)


def test_a_block_of_one_query_token_is_unique_and_of_more_is_shared():
    builder = BatchBuilder(16, 4)
    two_decodes = [_decode(6, [3, 5]), _decode(5, [3, 9])]
    assert builder.need(two_decodes) == {"tokens": 2, "shared": 1, "unique": 2, "logits": 2}
    chunk = [Request([1, 2, 3], 6, [3, 5, 2])]
    assert builder.need(chunk) == {"tokens": 3, "shared": 2, "unique": 0, "logits": 1}
    first_prompt = [Request([1, 2, 3], 0, [3])]
    assert builder.need(first_prompt) == {"tokens": 3, "shared": 0, "unique": 0, "logits": 1}


def test_blocks_that_were_shared_in_an_earlier_step_are_unique_in_a_later_one():
    builder = BatchBuilder(16, 4)
    assert builder.need([_decode(6, [3, 5]), _decode(6, [3, 9])])["shared"] == 1
    later = [_decode(6, [3, 5]), _decode(6, [4, 9]), _decode(6, [4, 8])]
    assert builder.need(later) == {"tokens": 3, "shared": 1, "unique": 4, "logits": 3}


def test_a_decode_step_as_tensors():
    step = BatchBuilder(16, 4).build([_decode(6, [3, 5]), _decode(8, [4, 9, 2])])
    assert step.slot_mapping.tolist() == [5 * 4 + 2, 2 * 4 + 0]
    assert step.positions.tolist() == [6, 8]
    assert step.unique_blocks.tolist() == [3, 5, 4, 9, 2]
    assert step.unique_mapping.tolist() == [0, 0, 1, 1, 1]
    assert step.unique_usage.tolist() == [4, 3, 4, 4, 1]
    assert step.unique_starts.tolist() == [0, 4, 0, 4, 8]
    assert step.causal_group is None and step.shared_blocks is None
    assert step.logits_index.tolist() == [0, 1]


def test_a_mixed_step_as_tensors():
    step = BatchBuilder(16, 4).build(
        [_decode(4, [3, 5]), Request([1, 2, 3], 5, [8, 6]), Request([9, 9], 0, [1], num_logits=2)]
    )
    assert step.input_ids.tolist() == [7, 1, 2, 3, 9, 9]
    assert step.causal_group.tolist() == [-1, 1, 1, 1, 2, 2]
    assert step.shared_blocks.tolist() == [6, 8]
    assert step.shared_usage.tolist() == [[0, 0], [1, 4], [1, 4], [1, 4], [0, 0], [0, 0]]
    assert step.shared_lengths.tolist() == [1, 4]
    assert step.shared_starts.tolist() == [4, 0]
    assert step.logits_index.tolist() == [0, 3, 4, 5]


def test_a_block_at_two_places_stands_in_two_columns():
    requests = [_decode(3, [5]), _decode(7, [4, 5])]
    requests[1] = Request([7], 6, [4, 5])
    step = BatchBuilder(16, 4).build(requests)
    assert step.shared_blocks.tolist() == [5, 5]
    assert step.shared_starts.tolist() == [0, 4]
    assert step.shared_usage.tolist() == [[4, 0], [0, 3]]


@given(st.integers(0, 2**32), st.integers(0, 9))
@settings(max_examples=30)
def test_padding_points_at_the_null_block_and_is_in_range(seed, extra):
    scene = Scene(seed).random()
    plan = BatchBuilder(64, 4).plan(scene.requests)
    step = plan.fill({axis: n + extra for axis, n in plan.need.items()})
    tokens, shared, unique = (plan.need[a] for a in ("tokens", "shared", "unique"))
    assert not step.slot_mapping[tokens:].any() and not step.input_ids[tokens:].any()
    assert step.causal_group[tokens:].eq(-1).all()
    for tensor, used in (
        (step.shared_blocks, shared),
        (step.shared_lengths, shared),
        (step.unique_blocks, unique),
        (step.unique_mapping, unique),
        (step.unique_usage, unique),
    ):
        assert tensor is None or not tensor[used:].any()
    assert step.shared_usage is None or not step.shared_usage[tokens:].any()
    index_tensors = [
        t for name, t in step._asdict().items() if name not in ("causal_group", "unique_queries")
    ]
    assert all(t is None or t.numel() == 0 or int(t.amin()) >= 0 for t in index_tensors)


def test_queries_with_unique_blocks_are_padded_with_minus_one():
    plan = BatchBuilder(16, 4).plan([_decode(6, [3, 5])])
    assert plan.fill({**plan.need, "logits": 3}).unique_queries.tolist() == [0, -1, -1]


def test_building_a_step_never_changes_an_earlier_one():
    builder = BatchBuilder(64, 4)
    bucket = {"tokens": 64, "shared": 64, "unique": 64, "logits": 16}
    first = builder.build(Scene(1).random().requests, bucket)
    copies = [None if t is None else t.clone() for t in first]
    for seed in range(2, 8):
        builder.build(Scene(seed).random().requests, bucket)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, copies, strict=True))


def test_a_padding_step_has_the_shapes_of_its_bucket():
    bucket = {"tokens": 8, "shared": 3, "unique": 5, "logits": 2}
    scene = Scene(1).add(2, 3)
    padding, real = StepBatch.padding(bucket), BatchBuilder(64, 4).build(scene.requests, bucket)
    for name, one, other in zip(StepBatch._fields, padding, real, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name


def test_axes_of_size_zero_have_no_tensors():
    step = StepBatch.padding({"tokens": 4, "shared": 0, "unique": 0, "logits": 1, "causal": 0})
    assert step.shared_blocks is step.unique_blocks is step.causal_group is None


@pytest.mark.parametrize("axis", ["tokens", "shared", "unique", "logits"])
def test_a_bucket_without_an_axis_is_refused_with_what_is_missing(axis):
    bucket = {"tokens": 4, "shared": 2, "unique": 2, "logits": 1}
    del bucket[axis]
    with pytest.raises(ValueError, match=rf"expected a bucket with .*, got .*: add {axis}"):
        StepBatch.padding(bucket)


@pytest.mark.parametrize("axis", ["tokens", "requests"])
def test_a_bucket_of_tables_without_an_axis_is_refused_with_what_is_missing(axis):
    bucket = {"tokens": 4, "requests": 2}
    del bucket[axis]
    with pytest.raises(ValueError, match=rf"expected a bucket with .*, got .*: add {axis}"):
        TableBatch.padding(bucket, 3)
    with pytest.raises(ValueError, match=r"sizes of at least 0, got {'tokens': -1}"):
        TableBatch.padding({"tokens": -1, "requests": 2}, 3)
    with pytest.raises(ValueError, match=r"sizes of at least 0, got {'width': -1}"):
        TableBatch.padding({"tokens": 4, "requests": 2}, -1)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 3, [4]), "query_len >= 1"),
        (Request([1], 4, [4]), "room for 4"),
        (Request([1], -1, [4]), "context_len >= 0"),
        (Request([1], 0, [0]), "null block"),
        (Request([1], 0, [-1]), "block ids in 1..15"),
        (Request([1], 0, [16]), "block ids in 1..15"),
        (Request([1], 0, [3], num_logits=2), "num_logits"),
    ],
)
def test_a_bad_request_is_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        BatchBuilder(16, 4).build([_decode(2, [1]), request_])


def test_two_requests_that_write_one_slot_are_refused():
    with pytest.raises(ValueError, match="a different slot for every new token"):
        BatchBuilder(16, 4).build([_decode(2, [1]), _decode(2, [1])])


@pytest.mark.parametrize("sizes", [(1, 4), (2, 0)])
def test_the_smallest_cache_has_one_slot_besides_the_null_block(sizes):
    step = BatchBuilder(2, 1).build([_decode(0, [1])])
    assert (step.slot_mapping.tolist(), step.unique_blocks.tolist()) == ([1], [1])
    with pytest.raises(ValueError, match="num_blocks >= 2 and block_size >= 1"):
        BatchBuilder(*sizes)


def test_a_chunk_that_does_not_end_its_prompt_needs_no_logits():
    plan = BatchBuilder(16, 4).plan([Request([1, 2], 0, [3], num_logits=0), _decode(6, [4, 5])])
    assert plan.need["logits"] == 1 and plan.fill().logits_index.tolist() == [2]


def test_an_empty_step_is_refused():
    with pytest.raises(ValueError, match="at least one request"):
        BatchBuilder(16, 4).build([])


def test_a_bucket_that_is_too_small_is_refused_with_the_axes():
    with pytest.raises(ValueError, match="unique"):
        BatchBuilder(16, 4).build(
            [_decode(6, [3, 5])], {"tokens": 1, "shared": 0, "unique": 1, "logits": 1}
        )


def test_numpy_tables_of_any_integer_type_and_spare_entries_are_taken():
    table = np.array([3, 5, 15, 999], np.int32)
    step = BatchBuilder(16, 4).build([Request(np.array([7], np.int32), 6, table)])
    assert step.unique_blocks.tolist() == [3, 5]


def test_shared_blocks_have_a_bias_or_their_usage_where_they_are_read_in_chunks():
    builder = BatchBuilder(16, 2)
    step = builder.build([_decode(0, [3]), _decode(2, [3, 4])])
    assert step.metadata(2).shared_bias.tolist() == [[[0, -math.inf]], [[0, 0]]]
    assert torch.equal(step.metadata(2, shared_chunk=1).shared_bias, step.shared_usage)
    assert builder.build([_decode(2, [3, 4])]).metadata(2).shared_bias is None


def test_a_plan_knows_its_block_size():
    plan = BatchBuilder(16, 4).plan([_decode(6, [3, 5])])
    for other in (1, 8):
        with pytest.raises(ValueError, match=f"expected block_size 4, got {other}"):
            plan.attention_metadata(other)
    assert plan.attention_metadata(4).block_tables.tolist() == [[3, 5]]
