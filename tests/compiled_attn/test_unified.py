"""Unified attention on mixed, padded, poisoned steps against dense float64 attention."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn import BatchBuilder, PagedKVCache, UnifiedAttention, unified_attention
from compiled_attn.kernels import SdpaKernel
from compiled_attn.partial import attend
from tests.oracle import Scene, Shape

ATTENDS = [pytest.param(attend, id="reference"), pytest.param(SdpaKernel.attend, id="sdpa")]


def _run(scene: Scene, padding: int = 0, causal_width=None, **options):
    s = scene.shape
    plan = BatchBuilder(s.num_blocks, s.block_size).plan(scene.requests)
    bucket = {axis: n + padding for axis, n in plan.need.items()} if padding else None
    step = plan.fill(bucket)
    metadata = step.metadata(s.block_size, causal_width)
    out, lse = unified_attention(
        *scene.flat(len(step.input_ids)),
        scene.key_cache,
        scene.value_cache,
        s.head_dim**-0.5,
        metadata,
        return_lse=True,
        **options,
    )
    return out, lse, plan.need["tokens"]


def _assert_exact(scene: Scene, atol: float = 2e-6, padding: int = 0, **options) -> None:
    features = {k: v for k, v in options.items() if k in ("softcap", "sinks")}
    expected, expected_lse = scene.expected(window=options.get("sliding_window"), **features)
    out, lse, tokens = _run(scene, padding, **options)
    torch.testing.assert_close(out[:tokens].double(), expected, atol=atol, rtol=atol)
    torch.testing.assert_close(lse[:tokens].double(), expected_lse, atol=2e-5, rtol=2e-5)
    assert not out[tokens:].any()
    if "sinks" not in features:
        assert lse[tokens:].eq(-math.inf).all()


@pytest.mark.parametrize("kernel", ATTENDS)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 3, 4, 7, 16]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 5]),
    padding=st.integers(0, 6),
    window=st.sampled_from([None, None, 1, 5, 30]),
    width=st.sampled_from([None, 1, 4]),
    poison=st.sampled_from([math.nan, math.inf]),
)
@settings(deadline=None, max_examples=40)
def test_any_mixed_batch_is_exact(
    kernel, seed, block_size, kv_heads, group, padding, window, width, poison
):
    scene = Scene(seed, Shape(block_size, kv_heads, group), poison).random()
    _assert_exact(scene, padding=padding, sliding_window=window, causal_width=width, attend=kernel)


def test_a_decode_counts_its_own_token_once_next_to_a_prompt_chunk():
    _assert_exact(Scene(1).add(9, 1).add(6, 5).add(0, 1))


def test_a_draft_sees_only_drafts_before_it():
    _assert_exact(Scene(2).add(9, 4).add(3, 1))


def test_a_decode_inside_a_full_block_and_at_a_block_boundary():
    _assert_exact(Scene(3).add(7, 1).add(8, 1).add(3, 1).add(4, 1))


def test_requests_of_one_prefix_read_it_as_shared_blocks():
    scene = Scene(4).share_prefix(3).add(2, 1, shared=True).add(0, 1, shared=True).add(5, 1)
    builder = BatchBuilder(scene.shape.num_blocks, scene.shape.block_size)
    assert builder.need(scene.requests)["shared"] == 3
    _assert_exact(scene, padding=3)


def test_a_prefix_shared_by_a_decode_and_a_chunk_is_exact():
    _assert_exact(Scene(5).share_prefix(2).add(1, 6, shared=True).add(3, 1, shared=True))


def test_softcap_and_sinks_are_exact():
    scene = Scene(6, Shape(kv_heads=2, group=2)).random()
    _assert_exact(scene, softcap=0.5)
    _assert_exact(scene, sinks=torch.tensor([0.1, -2.0, 1.5, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ATTENDS)
def test_half_precision_is_as_good_as_the_rounding_of_its_inputs(dtype, kernel):
    scene = Scene(7, Shape(block_size=16, kv_heads=1, group=4, head_dim=64, dtype=dtype)).random(6)
    out, _, tokens = _run(scene, 5, attend=kernel)
    expected, _ = scene.expected()
    # Values are of order 1: a few units in the last place of the output.
    ulp = torch.finfo(dtype).eps
    assert (out[:tokens].double() - expected).abs().max() < 4 * ulp


def test_the_cache_is_written_at_the_new_slots_and_nowhere_else():
    scene = Scene(8).random()
    before = scene.key_cache.clone()
    out_tokens = _run(scene)[2]
    s = scene.shape
    slots = BatchBuilder(s.num_blocks, s.block_size).build(scene.requests).slot_mapping
    assert len(slots) == out_tokens
    torch.testing.assert_close(scene.key_cache[slots], scene.flat(out_tokens)[1])
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(
        scene.key_cache[untouched].view(torch.int32), before[untouched].view(torch.int32)
    )


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=15)
def test_a_larger_bucket_changes_nothing_beyond_rounding(seed):
    scene = Scene(seed).random()
    small, _, tokens = _run(scene)
    large, _, _ = _run(scene, 17)
    torch.testing.assert_close(small[:tokens], large[:tokens], atol=1e-6, rtol=1e-6)


def test_chunks_with_any_boundary_equal_one_prompt():
    whole = Scene(9).add(0, 11)
    expected, _ = whole.expected()
    key, value, query = whole.keys[0], whole.values[0], whole.queries[0]
    for first in range(1, 11):
        scene = Scene(9).add(first, 11 - first)
        scene.keys, scene.values, scene.queries = [key], [value], [query[first:]]
        blocks = scene.requests[0].block_table
        for position in range(first):
            slot = int(blocks[position // 4]) * 4 + position % 4
            scene.key_cache[slot], scene.value_cache[slot] = key[position], value[position]
        out, _, _ = _run(scene)
        torch.testing.assert_close(out.double(), expected[first:], atol=2e-6, rtol=2e-6)


def test_the_module_equals_the_function():
    scene = Scene(10).random()
    s = scene.shape
    cache = PagedKVCache(2, s.num_blocks, s.block_size, s.kv_heads, s.head_dim)
    cache.key(1).copy_(scene.key_cache)
    cache.value(1).copy_(scene.value_cache)
    step = BatchBuilder(s.num_blocks, s.block_size).build(scene.requests)
    module = UnifiedAttention(cache, layer=1, sliding_window=6)
    out = module(*scene.flat(len(step.input_ids)), step.metadata(s.block_size))
    torch.testing.assert_close(out.double(), scene.expected(window=6)[0], atol=2e-6, rtol=2e-6)
    assert not cache.key(0).any()


def test_metadata_describes_its_step():
    scene = Scene(11).add(5, 1).add(3, 4)
    s = scene.shape
    metadata = BatchBuilder(s.num_blocks, s.block_size).build(scene.requests).metadata(s.block_size)
    assert (metadata.is_prompt, metadata.seq_len, metadata.num_blocks) == (True, 5, 3)
    decode = BatchBuilder(s.num_blocks, s.block_size).build(scene.requests[:1])
    assert decode.metadata(s.block_size).seq_len == 1
    assert not decode.metadata(s.block_size).is_prompt


def test_tensors_of_another_bucket_are_refused_and_the_cache_is_untouched():
    scene = Scene(12).random()
    s = scene.shape
    step = BatchBuilder(s.num_blocks, s.block_size).build(scene.requests)
    metadata, tokens = step.metadata(s.block_size), len(step.input_ids)
    before = scene.key_cache.nan_to_num(0.5)
    query, key, value = scene.flat(tokens)
    wrong = [
        (scene.flat(tokens + 1), metadata),
        ((query[:, :3], key, value), metadata),
        ((query, key, value[:-1]), metadata),
        ((query[0], key, value), metadata),
        (
            (query, key, value),
            dataclasses.replace(metadata, shared_bias=metadata.shared_bias[:, :-1]),
        ),
        ((query, key, value), dataclasses.replace(metadata, block_size=5)),
    ]
    for tensors, bad in wrong:
        with pytest.raises(ValueError, match=r"expected"):
            unified_attention(*tensors, scene.key_cache, scene.value_cache, 1.0, bad)
    assert torch.equal(scene.key_cache.nan_to_num(0.5), before)


def test_a_window_needs_positions_and_a_positive_size():
    scene = Scene(13).random()
    s = scene.shape
    metadata = BatchBuilder(s.num_blocks, s.block_size).build(scene.requests).metadata(s.block_size)
    with pytest.raises(ValueError, match="at least 1"):
        metadata.windowed(0)
    with pytest.raises(ValueError, match="positions"):
        dataclasses.replace(metadata, positions=None).windowed(4)


def test_an_incomplete_or_absent_part_is_refused_before_anything_is_written():
    scene = Scene(14).add(9, 1).add(6, 5)
    s = scene.shape
    step = BatchBuilder(s.num_blocks, s.block_size).build(scene.requests)
    metadata, tensors = step.metadata(s.block_size), scene.flat(len(step.input_ids))
    before = scene.key_cache.nan_to_num(0.5)
    nothing = {"causal_bias": None, "shared_blocks": None, "shared_bias": None}
    nothing |= {"unique_blocks": None, "unique_block_mapping": None, "unique_bias": None}
    for change in (
        {"unique_bias": None},
        {"shared_bias": None},
        {"unique_bias": metadata.unique_bias[:1]},
        {"unique_block_mapping": metadata.unique_block_mapping[:1]},
        nothing,
    ):
        with pytest.raises(ValueError, match="expected"):
            unified_attention(
                *tensors,
                scene.key_cache,
                scene.value_cache,
                1.0,
                dataclasses.replace(metadata, **change),
            )
    with pytest.raises(ValueError, match="positions"):
        unified_attention(
            *tensors,
            scene.key_cache,
            scene.value_cache,
            1.0,
            dataclasses.replace(metadata, positions=None),
            sliding_window=3,
        )
    assert torch.equal(scene.key_cache.nan_to_num(0.5), before)
