"""The Triton kernels, interpreted: results, no host reads, no writes out of range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_attn.ops import KernelArgumentError, NativeOps
from compiled_attn.ops.triton.arguments import attend_launch, problem_of, results_of
from compiled_attn.ops.triton.tiles import Chip, Plan, Tile, plan
from tests.compiled_attn.ops.kernels import TRITON, interpreted, loaded
from tests.compiled_attn.ops.native_cases import CASES, MIXED
from tests.compiled_attn.ops.native_scene import assert_right, new_tokens, scene
from tests.compiled_attn.ops.test_reference import WRITES, assert_writes


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return loaded(TRITON)


def test_a_launch_is_that_of_the_sizes_alone():
    """Tensors without memory have all that it needs, so a captured graph serves any numbers."""
    step = scene(MIXED, padding=2, padded_requests=1)
    here = step.call
    tensors = {k: v for k, v in here._asdict().items() if isinstance(v, torch.Tensor)}
    call = here._replace(**{name: each.to("meta") for name, each in tensors.items()})
    chosen = plan(problem_of(call), Chip(1, is_hopper=False))
    launch = attend_launch(call, chosen, results_of(call, chosen, None), widen=False, has_fp8=False)
    queries = launch.arguments["ROWS"] // launch.arguments["TILE_HEADS"]
    assert launch.grid == (14 // queries + 6, 2, 1)
    again = scene([(3, 3), (9, 90)], padding=2, padded_requests=4)
    again.block_table = again.block_table[:, : step.block_table.shape[1]]
    assert problem_of(again.call) == problem_of(here)


class NoNumbers(TorchDispatchMode):
    """Refuses to bring a number to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_number_is_brought_to_the_host(ops):
    step = scene(MIXED, padding=2, poison=0.5)
    key, value, slots = new_tokens(step)
    with NoNumbers():
        result = ops.paged_attention_(
            step.query, key, value, step.key_cache, step.value_cache, slots, *step.step
        )
    assert_right(result, step)


def test_float64_is_refused(ops):
    step = scene(MIXED)
    step.query, step.key_cache, step.value_cache = (
        each.double() for each in (step.query, step.key_cache, step.value_cache)
    )
    with pytest.raises(KernelArgumentError, match="expected a query of float32, bfloat16 or float"):
        ops.paged_attention(*step.arguments)


BAD = {
    "a block too large": lambda s: s.block_table.__setitem__((1, 0), 10**6),
    "a negative block": lambda s: s.block_table.__setitem__((1, 0), -1),
    "a length": lambda s: s.seq_lens.__setitem__(1, 2**31 - 1),
    "a negative length": lambda s: s.seq_lens.__setitem__(1, -1),
}


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("name", BAD)
def test_a_number_out_of_range_makes_nan_of_its_request_alone(ops, name, size):
    step = scene(MIXED, size=size)
    want, _ = ops.paged_attention(*step.arguments)
    BAD[name](step)
    out, lse = ops.paged_attention(*step.arguments)
    begin, end = step.query_start_loc[1:3].tolist()
    assert out[begin:end].isnan().all() and lse[begin:end].isnan().all()
    assert torch.equal(out[:begin], want[:begin]) and torch.equal(out[end:], want[end:])


def test_slots_out_of_range_are_not_written(ops):
    step = scene(MIXED, poison=0.5)
    key, value, slots = new_tokens(step)
    slots[3], slots[4] = -1, step.key_cache.shape[0] * step.key_cache.shape[1]
    keys, values = step.key_cache.clone(), step.value_cache.clone()
    ops.paged_attention_(
        step.query, key, value, step.key_cache, step.value_cache, slots, *step.step
    )
    written = torch.zeros(keys.shape[0] * keys.shape[1], dtype=torch.bool)
    written[torch.cat([slots[:3], slots[5:]])] = True
    for cache, before in ((step.key_cache, keys), (step.value_cache, values)):
        assert torch.equal(cache.flatten(0, 1)[~written], before.flatten(0, 1)[~written])


def test_a_neighbour_changes_no_bit(ops):
    step = scene(MIXED, size=8)
    want, want_lse = ops.paged_attention(*step.arguments)
    step.query[0] *= 3
    step.key_cache[step.block_table[0, 0]] = torch.nan
    step.seq_lens[0] = 5
    out, lse = ops.paged_attention(*step.arguments)
    assert torch.equal(out[1:], want[1:]) and torch.equal(lse[1:], want_lse[1:])


# The whole suite (`test_reference`, `test_edges`) is slow when interpreted.
SAMPLE = [
    "bfloat16", "block 7", "everything", "head size 80", "smaller values", "strided", "int8 HND",
    "e4m3 for bfloat16", "not causal", "padding alone", "more queries than keys", "sinks",
]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_steps_equals_dense_attention(ops, name):
    step = scene(**CASES[name])
    assert_right(ops.paged_attention(*step.arguments, **step.options), step)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_need_not_be_positive(ops, scale):
    step = scene(MIXED, dim=64)
    step.scale = scale
    assert_right(ops.paged_attention(*step.arguments, **step.options), step)


@pytest.mark.parametrize("name", ["bfloat16", "int8 of bfloat16", "e4m3 HND"])
def test_new_tokens_are_written_bit_for_bit_and_then_seen(ops, name):
    assert_writes(ops, **WRITES[name])


@settings(max_examples=8)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 5, 17]), st.integers(0, 50)), max_size=5
    ),
    tile=st.tuples(
        st.sampled_from([16, 32]), st.sampled_from([16, 32]), st.sampled_from([1, 2, 4])
    ),
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
    assert_right(attend(step.call, Plan(Tile(rows, keys, 4, 1), splits)), step)
