"""Features of unified attention, alone and in any combination, on steps as mixed as ever."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn import PagedKVCache, UnifiedAttention
from compiled_attn.attention.dense import attend
from compiled_attn.attention.sdpa import SdpaKernel
from tests.compiled_attn.attention.unified_run import (
    assert_exact,
    attention_of,
    in_chunks,
    metadata_of,
    run,
)
from tests.oracle import LARGEST, Scene, Shape

KERNELS = {"reference": attend, "sdpa": SdpaKernel.attend}
QUANTISED = tuple(LARGEST)
BLOCKS = {1: 128, 7: 64, 16: 40, 32: 32, 128: 28}


@given(data=st.data(), seed=st.integers(0, 2**32))
def test_any_combination_of_features_is_exact(data, seed):
    def one_of(*choices):
        return data.draw(st.sampled_from(choices))

    latent, dtype = one_of(False, True), one_of(torch.float64, torch.float32)
    shape = Shape(
        block_size=one_of(*BLOCKS),
        kv_heads=one_of(1, 2, 3),
        group=one_of(1, 2, 4),
        head_dim=(dim := one_of(32, 80, 96, 112)),
        dtype=dtype,
        cache_dtype=one_of(None, torch.bfloat16, *QUANTISED),
        value_dim=value_dim if (value_dim := one_of(None, 24, 128)) and not latent else None,
        latent=latent,
    )
    shape = Shape(**{**vars(shape), "num_blocks": BLOCKS[shape.block_size]})
    scene = Scene(seed, shape, one_of(math.nan, math.inf, -math.inf)).random(4)
    heads, softcap = shape.kv_heads * shape.group, one_of(None, 0.5, 3.0)
    taken = one_of(None, 24, dim) if latent else one_of(None, shape.value_dim or dim)

    def random(*size):
        return torch.randn(*size, generator=scene.generator, dtype=torch.float64)

    assert_exact(
        scene,
        padding=one_of(0, 3),
        causal_width=one_of(None, 4),
        shared_chunk=one_of(None, 1, 2, 5),
        index_dtype=one_of(torch.int32, torch.int64),
        sliding_window=one_of(None, 1, 9, 40),
        softcap=softcap,
        alibi_slopes=one_of(None, 2.0 ** -random(heads).abs()),
        sinks=one_of(None, random(heads)),
        value_projection=None if taken is None else random(heads, taken, 5),
        attend=KERNELS["reference" if softcap else one_of(*KERNELS)],
    )


SLOPES = torch.tensor([0.5, 0.25, -0.125, 2.0], dtype=torch.float64)
SINKS = torch.tensor([0.1, -2.0, 1.5, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("shape", "features"),
    [
        ({}, {"alibi_slopes": SLOPES, "shared_chunk": 2}),
        ({}, {"sinks": SINKS, "shared_chunk": 1, "causal_width": 2}),
        ({"cache_dtype": torch.int8}, {"shared_chunk": 2}),
        ({"cache_dtype": torch.float8_e4m3fn, "latent": True, "kv_heads": 1, "group": 4}, {}),
    ],
    ids=["ALiBi", "sinks", "int8", "fp8 latents"],
)
def test_a_feature_is_exact_in_all_three_parts(kernel, shape, features):
    scene = Scene(1, Shape(dtype=torch.float64, **shape)).share_prefix(3)
    scene.add(2, 1, shared=True).add(0, 6, shared=True).add(9, 1).add(0, 3)
    assert_exact(scene, padding=4, attend=KERNELS[kernel], **features)


def test_alibi_is_added_after_the_softcap():
    slopes = torch.tensor([1.0, 0.5, 0.25, 2.0], dtype=torch.float64)
    scene = Scene(2, Shape(dtype=torch.float64)).random()
    # Capped scores lie within 0.3 of each other: a cap over the slopes would show.
    assert_exact(scene, alibi_slopes=slopes, softcap=0.15)


def test_slopes_of_half_precision_do_not_round_distances():
    # 2.5 a token, 1001 tokens: bfloat16 has no number between 2496 and 2512.
    slopes = torch.full((1,), -2.5)
    scene = Scene(3, Shape(16, 1, 1, num_blocks=150)).add(1000, 1).add(990, 3)
    wide = run(scene, alibi_slopes=slopes)
    narrow = run(scene, alibi_slopes=slopes.bfloat16())
    assert torch.equal(wide.out, narrow.out) and torch.equal(wide.lse, narrow.lse)


def test_slopes_of_float64_serve_queries_of_float32():
    slopes = torch.tensor([0.5, 0.25, 0.125, 2.0])
    scene = Scene(4).random()
    for kernel in KERNELS.values():
        single, double = (
            run(scene, alibi_slopes=slopes.to(dtype), attend=kernel)
            for dtype in (torch.float32, torch.float64)
        )
        torch.testing.assert_close(single.out, double.out, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("chunk", [None, 2])
def test_float64_has_the_accuracy_of_float64_under_slopes_of_float32(kernel, chunk):
    slopes = torch.tensor([0.5, 0.25, 0.125, 2.0]) / 7  # times a distance none is a float32
    scene = Scene(1, Shape(dtype=torch.float64)).share_prefix(3)
    scene.add(2, 1, shared=True).add(0, 6, shared=True).add(9, 1).add(0, 3)
    result = run(scene, shared_chunk=chunk, alibi_slopes=slopes, attend=KERNELS[kernel])
    expected, _ = scene.expected(alibi_slopes=slopes)
    torch.testing.assert_close(result.out, expected, rtol=1e-12, atol=1e-12)


def test_a_row_of_padding_sees_nothing_but_its_sink():
    sinks = torch.tensor([0.1, -2.0, 1.5, 0.0])
    result = run(Scene(6).random(), padding=3, sinks=sinks)
    assert not result.padded_out.any()
    torch.testing.assert_close(result.padded_lse, sinks.expand(3, -1))


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_a_chunk_is_all_of_the_shared_blocks_that_a_kernel_ever_sees(chunk):
    keys_seen = []

    def watched(query, key, value, bias, **options):
        keys_seen.append(key.shape[0])
        assert bias.shape == (len(query), len(key))
        return attend(query, key, value, bias, **options)

    scene = Scene(8).share_prefix(7).add(1, 1, shared=True).add(2, 1, shared=True)
    metadata = metadata_of(scene, shared_chunk=chunk)
    assert metadata.shared_bias.shape == (2, 7)  # usages: no bias of all blocks exists
    out = attention_of(scene, metadata, attend=watched).out
    assert keys_seen == [min(chunk, 7 - at) * 4 for at in range(0, 7, chunk)]
    torch.testing.assert_close(out.double(), scene.expected()[0], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("form", ["shared", "unique", "causal"])
def test_a_bias_can_have_an_axis_of_heads(form):
    scene = Scene(9, Shape(dtype=torch.float64)).share_prefix(2)
    scene.add(0, 1, shared=True).add(5, 4, shared=True).add(7, 1)
    metadata = metadata_of(scene)
    bias = getattr(metadata, f"{form}_bias")
    axis = 1 if form == "unique" else 0
    by_head = bias.unsqueeze(axis).expand(*bias.shape[:axis], 4, *bias.shape[axis:])
    changed = vars(metadata) | {f"{form}_bias": by_head.contiguous()}
    result = attention_of(scene, type(metadata)(**changed))
    torch.testing.assert_close(result.out, scene.expected()[0], atol=1e-12, rtol=1e-12)


def test_latents_equal_attention_over_the_keys_and_values_they_stand_for():
    """Absorbed form (queries in latent space) against DeepSeek-V2's plain one."""
    rank, rope, heads, dim = 12, 4, 3, 8
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    up_key, up_value, latents = random(heads, rank, dim), random(heads, rank, dim), random(15, rank)
    rotary, query, query_rotary = random(15, rope), random(15, heads, dim), random(15, heads, rope)
    keys = torch.einsum("lr,hrd->lhd", latents, up_key)
    keys = torch.cat([keys, rotary.unsqueeze(1).expand(-1, heads, -1)], -1)
    values = torch.einsum("lr,hrd->lhd", latents, up_value)
    plain = torch.nn.functional.scaled_dot_product_attention(
        torch.cat([query, query_rotary], -1).transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        is_causal=True,
    ).transpose(0, 1)

    scene = Scene(11, Shape(4, 1, heads, rank + rope, dtype=torch.float64, latent=True)).add(0, 15)
    absorbed = torch.einsum("thd,hrd->thr", query, up_key)
    scene.queries[0] = torch.cat([absorbed, query_rotary], -1)
    scene.keys[0] = torch.cat([latents, rotary], -1).unsqueeze(1)
    scale = (dim + rope) ** -0.5
    out = run(scene, value_projection=up_value, scale=scale).out
    torch.testing.assert_close(out, plain, atol=1e-12, rtol=1e-12)
    scene.key_cache.fill_(math.nan)
    decoded = in_chunks(scene, list(range(1, 15)), value_projection=up_value, scale=scale)
    torch.testing.assert_close(decoded, plain, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("cache_dtype", QUANTISED)
def test_new_tokens_are_seen_as_the_cache_stores_them(cache_dtype, latent):
    shape = Shape(7, cache_dtype=cache_dtype, dtype=torch.float64, latent=latent)
    scene = Scene(13, shape).add(0, 30)
    whole = run(scene).out
    torch.testing.assert_close(whole, scene.expected()[0], atol=1e-12, rtol=1e-12)
    for boundaries in ([1], [7], [13, 20], [29], list(range(1, 30))):
        chunks = in_chunks(scene, boundaries)
        torch.testing.assert_close(chunks, whole, atol=1e-12, rtol=1e-12)
    rounding = (whole - _unrounded(scene)).abs().max()
    assert rounding > 1e-4, "the test needs rounding that would show"


def _unrounded(scene):
    exact = Scene(0, Shape(**{**vars(scene.shape), "cache_dtype": None}))
    exact.queries, exact.keys, exact.values = scene.queries, scene.keys, scene.values
    return exact.expected()[0]


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("latent", [False, True])
def test_the_module_equals_the_function(cache_dtype, latent):
    scene = Scene(14, Shape(cache_dtype=cache_dtype, latent=latent)).random()
    s = scene.shape
    cache = PagedKVCache(
        2, s.num_blocks, s.block_size, s.kv_heads, s.head_dim, dtype=s.stored, has_value=not latent
    )
    for name, tensor in scene.caches.items():
        if tensor is not None:
            getattr(cache, name.replace("_cache", ""))(1).copy_(tensor)
    features = {
        "sliding_window": 6,
        "alibi_slopes": torch.tensor([0.5, 0.25, 1.0, 0.0]),
        "sinks": torch.nn.Parameter(torch.tensor([0.1, -2.0, 1.5, 0.0])),
        "value_projection": torch.nn.Parameter(torch.randn(4, 16, 5)),
    }
    metadata = metadata_of(scene, shared_chunk=1)
    module = UnifiedAttention(cache, layer=1, **features)
    with torch.no_grad():
        out = module(*scene.flat(len(metadata.slot_mapping)), metadata)
        assert torch.equal(out, attention_of(scene, metadata, **features).out)
        torch.testing.assert_close(
            out.double(), scene.expected(**features)[0], atol=2e-5, rtol=2e-5
        )
    assert not cache.key(0).float().any()
    assert set(module.state_dict()) == {"sinks", "value_projection"}
