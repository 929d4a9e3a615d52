"""Any mix of requests, with any options, is what dense attention in float64 makes of it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled_attn.ops.kernels import interpreted
from tests.compiled_attn.ops.native_scene import assert_right, scene
from tests.compiled_attn.ops.triton.scenes import call_of

lengths = st.integers(0, 50)
requests = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5, 17]), lengths), max_size=5)
tiles = st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 32]), st.sampled_from([1, 2, 4]))


@settings(max_examples=8)
@given(
    requests=requests,
    tile=tiles,
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (5, 1)]),
    dims=st.sampled_from([(16, 16), (24, 8), (72, 16)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    cache=st.sampled_from([None, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]),
    size=st.sampled_from([1, 5, 16, 32]),
    window=st.sampled_from([None, 1, 7, 30]),
    softcap=st.sampled_from([None, 1.5]),
    with_slopes=st.booleans(),
    with_sinks=st.booleans(),
    layout=st.sampled_from(["NHD", "HND", "strided"]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_random_steps_are_those_of_dense_attention(
    requests, tile, heads, dims, dtype, cache, size, window, softcap, with_slopes, with_sinks,
    layout, padding, seed,
):  # fmt: skip
    interpreted()
    from compiled_attn.ops.triton.launch import attend
    from compiled_attn.ops.triton.tiles import Plan, Tile

    layout = "HND" if cache and layout == "strided" else layout
    options = {
        "alibi_slopes": torch.linspace(0, 0.5, heads[0]) if with_slopes else None,
        "sinks": torch.linspace(-1, 1, heads[0]) if with_sinks else None,
        "window": window,
        "softcap": softcap,
    }
    step = scene(
        requests, heads=heads[0], kv_heads=heads[1], dim=dims[0], value_dim=dims[1], size=size,
        dtype=dtype, cache_dtype=cache, layout=layout, padding=padding, padded_requests=padding,
        seed=seed, **options,
    )  # fmt: skip
    rows, keys, splits = tile
    assert_right(attend(call_of(step), Plan(Tile(rows, keys, 4, 1), splits)), step)
