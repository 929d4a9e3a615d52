"""The metadata of unified attention: what it says of its step, and what positions make of it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from compiled_attn import UnifiedMetadata
from tests.compiled_attn.attention.unified_run import attention_of, metadata_of, plan_of, run
from tests.oracle import Scene, Shape


def test_prompts_lengths_and_blocks_of_a_step():
    for step, expected in (
        (metadata_of(Scene(1).add(5, 1).add(3, 4)), (True, 5, 3)),
        (metadata_of(Scene(1).add(5, 1).add(9, 1)), (False, 1, 5)),
        (UnifiedMetadata(4, torch.zeros(3).long(), unique_blocks=7), (False, 1, 7)),
    ):
        assert (step.is_prompt, step.seq_len, step.num_blocks) == expected


def test_nothing_about_positions_changes_nothing():
    metadata = metadata_of(Scene(2).random())
    assert metadata.with_positions() is metadata


def test_a_window_hides_what_lies_before_it_and_shows_nothing_new():
    slots = torch.zeros(2, dtype=torch.int64)
    metadata = UnifiedMetadata(
        block_size=2,
        slot_mapping=slots,
        causal_bias=torch.tensor([[0, -math.inf], [0, 0]]),
        shared_blocks=torch.tensor([3, 5]),
        shared_bias=torch.tensor([[2, 1], [2, 1]]),
        unique_blocks=torch.tensor([7]),
        unique_block_mapping=torch.tensor([1]),
        unique_bias=torch.tensor([[0, -math.inf]]),
        positions=torch.tensor([3, 4]),
        shared_starts=torch.tensor([0, 2]),
        unique_starts=torch.tensor([2]),
        block_tables=torch.tensor([[3, 5, 7]]),
        seq_lens=torch.tensor([5]),
        query_start_loc=torch.tensor([0, 2]),
    ).windowed(3)
    assert metadata.by_request is None
    hidden = -math.inf
    assert metadata.causal_bias.tolist() == [[0, hidden], [0, 0]]
    assert metadata.shared_bias.tolist() == [
        [[hidden, 0], [0, hidden]],
        [[hidden, hidden], [0, hidden]],
    ]
    assert metadata.unique_bias.tolist() == [[0, hidden]]


def test_slopes_lower_a_bias_by_the_distance_and_give_it_an_axis_of_heads():
    metadata = UnifiedMetadata(
        block_size=2,
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        causal_bias=torch.zeros(1, 1),
        shared_blocks=torch.tensor([3]),
        shared_bias=torch.tensor([[1]]),
        unique_blocks=torch.tensor([7]),
        unique_block_mapping=torch.tensor([0]),
        unique_bias=torch.tensor([[0, -math.inf]]),
        positions=torch.tensor([10]),
        shared_starts=torch.tensor([4]),
        unique_starts=torch.tensor([6]),
    ).with_positions(alibi_slopes=torch.tensor([0.5, 2.0, 0.0]))
    assert metadata.causal_bias.tolist() == [[[0]], [[0]], [[0]]]
    assert metadata.shared_bias.tolist() == [
        [[[-3, -math.inf]]],
        [[[-12, -math.inf]]],
        [[[0, -math.inf]]],
    ]
    assert metadata.unique_bias.tolist() == [[[-2, -math.inf], [-8, -math.inf], [0, -math.inf]]]


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("form", ["usages", "bias"])
def test_chunks_hold_every_shared_block_once_and_nothing_else(chunk, form):
    scene = Scene(5).share_prefix(7).add(2, 1, shared=True).add(0, 1, shared=True)
    metadata = metadata_of(scene, shared_chunk=chunk if form == "usages" else None)
    metadata = dataclasses.replace(metadata, shared_chunk=chunk)
    chunks = list(metadata.chunks_of_shared())
    assert [len(part.shared_blocks) for part in chunks[:-1]] == [chunk] * (len(chunks) - 1)
    for name in ("shared_blocks", "shared_starts", "shared_lengths"):
        whole = torch.cat([getattr(part, name) for part in chunks])
        assert torch.equal(whole, getattr(metadata, name))
    whole = torch.cat([part.shared_bias for part in chunks], 1)
    assert torch.equal(whole, metadata.shared_bias)
    assert all(part.causal_bias is None and part.unique_bias is None for part in chunks)


def test_a_step_without_shared_blocks_has_no_chunks():
    assert not list(metadata_of(Scene(6).add(5, 1)).chunks_of_shared())


@pytest.mark.parametrize("shared_chunk", [None, 1])
@pytest.mark.parametrize("dropped", ["shared_lengths", "unique_queries"])
def test_fields_that_spare_work_can_be_left_out(shared_chunk, dropped):
    scene = Scene(8, Shape(dtype=torch.float64)).random()
    metadata = metadata_of(scene, padding=5, shared_chunk=shared_chunk)
    without = dataclasses.replace(metadata, **{dropped: None})
    expected, _ = scene.expected()
    out = attention_of(scene, without).out
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def test_building_and_running_the_next_step_changes_nothing_of_this_one():
    scene = Scene(9).random()
    plan = plan_of(scene)
    step = plan.fill({axis: n + 2 for axis, n in plan.need.items()})
    metadata = step.metadata(scene.shape.block_size)
    before = {name: t.clone() for name, t in vars(metadata).items() if isinstance(t, torch.Tensor)}
    run(Scene(10).random(), padding=2)
    run(scene, sliding_window=3, alibi_slopes=torch.ones(4))
    attention_of(scene, metadata, sliding_window=3, alibi_slopes=torch.ones(4))
    for name, old in before.items():
        assert torch.equal(getattr(metadata, name), old), name
