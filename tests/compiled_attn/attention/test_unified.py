"""Unified attention on mixed, padded, poisoned steps against dense float64 attention."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compiled_attn import BatchBuilder, PagedKVCache, Request, UnifiedMetadata, unified_attention
from compiled_attn.attention.dense import attend
from compiled_attn.attention.sdpa import SdpaKernel
from tests.compiled_attn.attention.unified_call import Call
from tests.compiled_attn.attention.unified_run import (
    assert_exact,
    attention_of,
    bits,
    in_chunks,
    metadata_of,
    plan_of,
    run,
)
from tests.oracle import Scene, Shape

ATTENDS = [pytest.param(attend, id="reference"), pytest.param(SdpaKernel.attend, id="sdpa")]

BLOCKS = {1: 128, 7: 64, 16: 40, 32: 32, 128: 28, 256: 28}
"""Block sizes, and blocks that are enough for any random scene of them."""


@pytest.mark.parametrize("kernel", ATTENDS)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from(sorted(BLOCKS)),
    head_dim=st.sampled_from([32, 64, 80, 96, 112, 128, 192, 256]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 5]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    padding=st.integers(0, 6),
    window=st.sampled_from([None, None, 1, 5, 30]),
    width=st.sampled_from([None, 1, 4]),
    chunk=st.sampled_from([None, 1, 2, 5]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    lists_queries=st.booleans(),
    poison=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_any_mixed_batch_is_exact(
    kernel, seed, block_size, head_dim, kv_heads, group, dtype, window, poison, **options
):
    shape = Shape(block_size, kv_heads, group, head_dim, BLOCKS[block_size], dtype)
    options = {
        "padding": options["padding"],
        "causal_width": options["width"],
        "shared_chunk": options["chunk"],
        "index_dtype": options["index_dtype"],
        "lists_queries": options["lists_queries"],
    }
    scene = Scene(seed, shape, poison).random()
    assert_exact(scene, sliding_window=window, attend=kernel, **options)


@pytest.mark.parametrize(
    "scene",
    [
        Scene(1).add(9, 1).add(6, 5).add(0, 1),
        Scene(2).add(9, 4).add(3, 1),
        Scene(4).add(7, 1).add(8, 1).add(3, 1).add(4, 1),
        Scene(6).share_prefix(2).add(1, 6, shared=True).add(3, 1, shared=True),
    ],
    ids=["decode and chunk", "drafts", "block boundaries", "shared prefix"],
)
def test_a_step_is_exact(scene):
    assert_exact(scene)


@pytest.mark.parametrize("drafts", [2, 3, 5])
def test_a_later_draft_changes_no_earlier_one(drafts):
    scene = Scene(3).add(9, drafts).add(6, 1)
    before = run(scene).out
    scene.keys[0][-1] += 100.0
    scene.values[0][-1] -= 100.0
    after = run(scene).out
    assert torch.equal(before[: drafts - 1], after[: drafts - 1])
    assert torch.equal(before[drafts:], after[drafts:])
    assert not torch.equal(before[drafts - 1], after[drafts - 1])


def test_requests_of_one_prefix_read_it_as_shared_blocks():
    scene = Scene(5).share_prefix(3).add(2, 1, shared=True).add(0, 1, shared=True).add(5, 1)
    assert plan_of(scene).need["shared"] == 3
    assert_exact(scene, padding=3)


@pytest.mark.parametrize("kernel", ATTENDS)
@pytest.mark.parametrize("fmin", [-1e4, -1e30])
def test_another_floor_of_the_maxima_changes_nothing(kernel, fmin):
    scene = Scene(7, Shape(dtype=torch.float64)).add(0, 3).add(9, 1).add(6, 5)
    metadata = metadata_of(scene, padding=4)
    plain = attention_of(scene, metadata, attend=kernel)
    lower = dataclasses.replace(metadata, fmin=fmin)
    for ours, theirs in zip(attention_of(scene, lower, attend=kernel), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_the_first_blocks_of_the_cache_can_be_given_as_a_number():
    scene = Scene(8)
    scene.free.sort(reverse=True)  # blocks 1, 2, .. in order
    scene.add(30, 1).add(25, 1)
    listed = metadata_of(scene)
    blocks = int(listed.unique_blocks.max()) + 1
    mapping = torch.zeros(blocks, dtype=torch.int64)
    bias = torch.full((blocks, scene.shape.block_size), -math.inf)  # hides null block 0
    mapping[listed.unique_blocks] = listed.unique_block_mapping
    bias[listed.unique_blocks] = listed.unique_bias
    counted = dataclasses.replace(
        listed, unique_blocks=blocks, unique_block_mapping=mapping, unique_bias=bias
    )
    out = attention_of(scene, counted).out.double()
    torch.testing.assert_close(out, scene.expected()[0], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_the_cache_is_written_at_the_new_slots_and_nowhere_else(cache_dtype):
    scene = Scene(9, Shape(cache_dtype=cache_dtype)).random()
    before = {name: bits(cache) for name, cache in scene.caches.items()}
    run(scene, padding=5)
    slots = plan_of(scene).fill().slot_mapping
    # Padding writes to the null block.
    touched = torch.zeros(len(scene.key_cache), dtype=torch.bool)
    touched[slots] = touched[: scene.shape.block_size] = True
    for name, cache in scene.caches.items():
        if cache is not None:
            assert torch.equal(bits(cache)[~touched], before[name][~touched]), name
    written = scene.key_cache[slots].float()
    assert written.isfinite().all() and written.any(-1).all()


@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 7, 16]),
    boundaries=st.sets(st.integers(1, 39), max_size=6),
)
@example(seed=0, block_size=7, boundaries=set(range(1, 40)))  # a token at a time
@example(seed=1, block_size=7, boundaries={13})
@settings(max_examples=20)
def test_chunks_with_any_boundaries_equal_one_prompt(seed, block_size, boundaries):
    scene = Scene(seed, Shape(block_size, dtype=torch.float64)).add(0, 40)
    expected, _ = scene.expected()
    torch.testing.assert_close(
        in_chunks(scene, sorted(boundaries)), expected, atol=1e-12, rtol=1e-12
    )


def test_a_step_whose_bucket_wants_no_logits_but_has_room_for_blocks():
    builder = BatchBuilder(4, 4).plan([Request([1, 2], 0, [1], num_logits=0)])
    batch = builder.fill({"tokens": 2, "shared": 0, "unique": 1, "logits": 0})
    cache, generator = PagedKVCache(1, 4, 4, 2, 8), torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, heads, 8, generator=generator) for heads in (4, 2, 2))
    out = unified_attention(
        query, key, value, cache.key(0), cache.value(0), 1.0, batch.metadata(4), kernel="portable"
    )
    key, value = (each.repeat_interleave(2, 1).double() for each in (key, value))
    scores = torch.einsum("thd,nhd->htn", query.double(), key)
    hidden = torch.ones(2, 2, dtype=torch.bool).triu(1)
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value.transpose(0, 1)
    torch.testing.assert_close(out.double(), want.transpose(0, 1), atol=1e-6, rtol=1e-6)


BY_POSITION = {"sliding_window": 2, "alibi_slopes": torch.ones(4)}


@pytest.mark.parametrize("kernel", [*ATTENDS, pytest.param(None, id="fastest")])
@pytest.mark.parametrize("part", ["causal", "shared", "unique"])
@pytest.mark.parametrize(
    ("features", "dtype"), [({}, torch.float32), (BY_POSITION, torch.bfloat16)]
)
def test_a_step_without_tokens_is_empty(kernel, part, features, dtype):
    none, padding = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    fields = {
        "causal": {"causal_bias": torch.zeros(0, 0)},
        "shared": {"shared_blocks": padding, "shared_bias": torch.zeros(0, 2, dtype=torch.int64)},
        "unique": {
            "unique_blocks": padding,
            "unique_block_mapping": padding,
            "unique_bias": torch.full((2, 4), -math.inf),
        },
    }[part]
    starts = {"positions": none, "shared_starts": padding, "unique_starts": padding}
    metadata = UnifiedMetadata(4, none, **fields, **starts)
    cache = PagedKVCache(1, 4, 4, 2, 8, dtype=dtype)
    query, key = torch.zeros(0, 4, 8, dtype=dtype), torch.zeros(0, 2, 8, dtype=dtype)
    query.requires_grad_()
    out, lse = unified_attention(
        query, key, key, cache.key(0), cache.value(0), 1.0, metadata, return_lse=True,
        attend=kernel, kernel="portable", sinks=torch.ones(4), **features,
    )  # fmt: skip
    assert out.shape == (0, 4, 8) and out.dtype == dtype
    assert lse.shape == (0, 4) and lse.dtype == torch.float32
    out.sum().backward()
    assert query.grad.shape == query.shape


def test_by_default_the_parts_take_the_fused_kernel_of_torch(monkeypatch):
    asked = []

    def noted(*args, **options):
        asked.append(args)
        return fused(*args, **options)

    fused = SdpaKernel.attend
    monkeypatch.setattr(SdpaKernel, "attend", staticmethod(noted))
    call = Call(dtype=torch.float32, cache_dtype=None).arguments
    before = call["key_cache"].clone(), call["value_cache"].clone()
    out = unified_attention(**call, kernel="portable")
    assert asked
    call["key_cache"].copy_(before[0])
    call["value_cache"].copy_(before[1])
    want = unified_attention(**call, kernel="portable", attend=attend)
    torch.testing.assert_close(out, want, rtol=3e-5, atol=3e-5)


def test_a_step_without_tokens_is_one_graph():
    none = torch.zeros(0, dtype=torch.int64)
    metadata = UnifiedMetadata(4, none, torch.zeros(0, 0))
    cache = PagedKVCache(1, 4, 4, 2, 8)
    step = torch.zeros(0, 4, 8), *torch.zeros(2, 0, 2, 8), cache.key(0), cache.value(0), 1.0
    compiled = torch.compile(unified_attention, backend="eager", fullgraph=True)
    assert compiled(*step, metadata).shape == (0, 4, 8)
