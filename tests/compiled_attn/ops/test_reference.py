"""The ops against dense attention: the Python reference, and every kernel this machine can run."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from compiled_attn.cache.quantisation import QUANTISED, quantise
from compiled_attn.ops import KernelArgumentError, NativeOps, load
from tests.compiled_attn.ops.kernels import BEST, ON_DEVICES, OTHERS, SLOW, loaded, threads
from tests.compiled_attn.ops.native_cases import CASES, MIXED
from tests.compiled_attn.ops.native_scene import Scene, assert_right, dense, new_tokens, scene

ON_CPU = ["reference", BEST, *SLOW[:-1], *OTHERS[-1:]]
"""The reference and every kernel; what is between the best and the plain one is slow."""


@pytest.fixture(params=[*ON_CPU, *ON_DEVICES], scope="module")
def ops(request) -> NativeOps:
    return loaded(request.param)


@pytest.fixture(params=ON_CPU, scope="module")
def ops_on_cpu(request) -> NativeOps:
    """Those that look at numbers before they run, and that threads may call at once."""
    return loaded(request.param)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_dense_attention(ops, name):
    step = scene(**CASES[name])
    assert_right(ops.paged_attention(*step.arguments, **step.options), step)


@pytest.mark.parametrize("seed", range(12))
def test_random_steps_are_those_of_dense_attention(ops, seed):
    gen = torch.Generator().manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=gen))]

    requests = []
    for _ in range(draw(1, 3, 6)):
        length = draw(1, 5, 17, 64, 130)
        requests.append((draw(1, min(length, 4), length), length))
    kv_heads = draw(1, 2, 3)
    heads = kv_heads * draw(1, 2, 5)
    options = {"window": draw(None, 1, 9), "softcap": draw(None, 3.0)}
    if draw(True, False):
        options["sinks"] = torch.randn(heads, generator=gen)
    if draw(True, False):
        options["alibi_slopes"] = torch.rand(heads, generator=gen)
    step = scene(
        requests, heads=heads, kv_heads=kv_heads, dim=draw(8, 24, 64, 128), size=draw(1, 4, 16, 32),
        cache_dtype=draw(None, torch.int8, torch.float8_e4m3fn),
        dtype=draw(torch.float32, torch.bfloat16), layout=draw("NHD", "HND"), padding=draw(0, 2),
        padded_requests=draw(0, 2), seed=seed, **options,
    )  # fmt: skip
    assert_right(ops.paged_attention(*step.arguments, **step.options), step)


def test_a_query_of_fused_rows_may_have_any_outer_strides(ops):
    step = scene(MIXED)
    fused = torch.randn(step.query.shape[0], 9, 16)
    step.query = fused[:, 2:6]
    assert_right(ops.paged_attention(*step.arguments), step)


def test_the_values_of_latents_may_be_a_view_of_the_keys(ops):
    step = scene(MIXED, kv_heads=1, dim=24)
    step.value_cache = step.key_cache[..., :16]
    assert_right(ops.paged_attention(*step.arguments), step)


def test_the_rows_of_a_wider_block_table_may_be_strided(ops):
    step = scene(MIXED)
    wide = torch.nn.functional.pad(step.block_table, (0, 9), value=-1)
    step.block_table = wide[:, : step.block_table.shape[1]]
    assert_right(ops.paged_attention(*step.arguments), step)


NEIGHBOURS = [(1, 300), (5, 40), (1, 31)]


@pytest.mark.parametrize("isa", ON_CPU[1:])
def test_the_number_of_threads_changes_no_bit(isa):
    """Kernels only: the reference uses torch's products, which depend on threads."""
    ops = loaded(isa)
    step = scene(NEIGHBOURS, size=16, dim=64, kv_heads=1)
    before, _ = ops.paged_attention(*step.arguments)
    with threads(torch.get_num_threads() + 1):
        again, _ = ops.paged_attention(*step.arguments)
    assert torch.equal(before, again)


@pytest.mark.parametrize(
    "kind", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "cache_dtype": torch.int8}]
)
def test_a_request_gets_the_same_bits_whatever_its_neighbours(ops_on_cpu, kind):
    step = scene(NEIGHBOURS, size=16, dim=64, kv_heads=1, **kind)
    together, _ = ops_on_cpu.paged_attention(*step.arguments, **step.options)
    for rows, alone in step.each_alone():
        out, _ = ops_on_cpu.paged_attention(*alone, **step.options)
        assert torch.equal(out, together[rows])


def test_threads_may_call_at_once(ops_on_cpu):
    steps = [scene([(1, 90), (20, 40)], size=16, dim=64, seed=seed) for seed in range(4)]
    expected = [ops_on_cpu.paged_attention(*step.arguments)[0] for step in steps]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            outs = [*pool.map(lambda step: ops_on_cpu.paged_attention(*step.arguments)[0], steps)]
            assert all(torch.equal(out, want) for out, want in zip(outs, expected, strict=True))


WRITES = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16, "dim": 64},
    "float16": {"dtype": torch.float16},
    "HND": {"layout": "HND"},
    "strided": {"layout": "strided"},
    "int8": {"cache_dtype": torch.int8},
    "int8 of bfloat16": {"cache_dtype": torch.int8, "dtype": torch.bfloat16, "dim": 80},
    "e4m3": {"cache_dtype": torch.float8_e4m3fn},
    "e5m2 of bfloat16": {"cache_dtype": torch.float8_e5m2, "dtype": torch.bfloat16},
    "e4m3 HND": {"cache_dtype": torch.float8_e4m3fn, "layout": "HND"},
}


@pytest.mark.parametrize("name", WRITES)
def test_new_tokens_are_written_bit_for_bit_and_then_seen(ops, name):
    assert_writes(ops, **WRITES[name])


def assert_writes(ops: NativeOps, **kind: Any) -> None:
    step = scene(MIXED, padding=2, padded_requests=1, poison=0.5, **kind)
    key, value, slots = new_tokens(step)
    before = {name: tensor.clone() for name, tensor in _storage(step).items()}
    query = step.query.clone()
    result = ops.paged_attention_(
        step.query, key, value, step.key_cache, step.value_cache, slots, *step.step,
        **step.options,
    )  # fmt: skip
    assert torch.equal(step.query, query)
    _expect_written(step, before, slots, {"key": key, "value": value})
    assert_right(result, step)


def _storage(step: Scene) -> dict[str, torch.Tensor]:
    names = ("key_scale", "value_scale")
    scales = {name: step.options[name] for name in names if name in step.options}
    return {"key_cache": step.key_cache, "value_cache": step.value_cache, **scales}


def _expect_written(step, before, slots, new) -> None:
    size = step.key_cache.shape[1]
    real = slots > 0
    at = slots[real] // size, slots[real] % size
    touched = torch.zeros(step.key_cache.shape[:2], dtype=torch.bool)
    touched[slots // size, slots % size] = True
    for which, rows in new.items():
        cache = getattr(step, f"{which}_cache")
        rows = rows[real]
        if cache.dtype in QUANTISED:
            rows, scales = quantise(rows, cache.dtype)
            now = step.options[f"{which}_scale"]
            assert torch.equal(now[at], scales)
            assert torch.equal(now[~touched], before[f"{which}_scale"][~touched])
        now, was = (x.contiguous().view(torch.uint8) for x in (cache, before[f"{which}_cache"]))
        assert torch.equal(now[~touched], was[~touched])
        assert torch.equal(cache[at].view(torch.uint8), rows.contiguous().view(torch.uint8))


def test_a_step_of_padding_alone_writes_to_the_null_block_only(ops):
    step = scene([], padding=4, padded_requests=3, poison=0.5)
    key, value, slots = new_tokens(step)
    keys = step.key_cache.clone()
    out, lse = ops.paged_attention_(
        step.query, key, value, step.key_cache, step.value_cache, slots, *step.step
    )
    assert torch.equal(step.key_cache[1:], keys[1:])
    assert not out.any() and (lse == -math.inf).all()


BAD_NUMBERS = {
    "a block of a request": lambda s: s.block_table.__setitem__((3, 1), 99),
    "a negative block": lambda s: s.block_table.__setitem__((0, 0), -1),
    "a length": lambda s: s.seq_lens.__setitem__(1, 1000),
    "a negative length": lambda s: s.seq_lens.__setitem__(1, -1),
    "falling offsets": lambda s: s.query_start_loc.__setitem__(2, 0),
    "offsets beyond the tokens": lambda s: s.query_start_loc.__setitem__(-1, 99),
    "a negative offset": lambda s: s.query_start_loc.__setitem__(0, -1),
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_a_number_out_of_range_is_an_error_before_anything_is_written(ops_on_cpu, name):
    step = scene(MIXED, poison=0.5)
    key, value, slots = new_tokens(step)
    BAD_NUMBERS[name](step)
    keys = step.key_cache.clone()
    with pytest.raises(KernelArgumentError, match=r"expected .* got .*: "):
        ops_on_cpu.paged_attention(*step.arguments)
    with pytest.raises(KernelArgumentError, match=r"expected .* got .*: "):
        ops_on_cpu.paged_attention_(
            step.query, key, value, step.key_cache, step.value_cache, slots, *step.step
        )
    assert torch.equal(step.key_cache, keys)


@pytest.mark.parametrize("slot", [-1, 10**6])
def test_a_slot_out_of_range_is_an_error_before_anything_is_written(ops_on_cpu, slot):
    step = scene(MIXED, poison=0.5)
    key, value, slots = new_tokens(step)
    slots[3] = slot
    keys, values = step.key_cache.clone(), step.value_cache.clone()
    with pytest.raises(KernelArgumentError, match=rf"slot_mapping\[3\].*{slot}"):
        ops_on_cpu.paged_attention_(
            step.query, key, value, step.key_cache, step.value_cache, slots, *step.step
        )
    assert torch.equal(step.key_cache, keys) and torch.equal(step.value_cache, values)


BAD_SHAPES = {
    "a flat query": lambda s: setattr(s, "query", s.query[0]),
    "a flat cache": lambda s: setattr(s, "key_cache", s.key_cache.flatten(0, 1)),
    "another head size": lambda s: setattr(s, "query", s.query[..., :8].contiguous()),
    "heads that do not divide": lambda s: setattr(s, "query", s.query[:, :3].contiguous()),
    "fewer value blocks": lambda s: setattr(s, "value_cache", s.value_cache[1:]),
    "a transposed query": lambda s: setattr(
        s, "query", s.query.transpose(1, 2).contiguous().transpose(1, 2)
    ),
    "another dtype of the cache": lambda s: setattr(s, "key_cache", s.key_cache.half()),
    "int64 tables": lambda s: setattr(s, "block_table", s.block_table.long()),
    "int64 lengths": lambda s: setattr(s, "seq_lens", s.seq_lens.long()),
    "too few offsets": lambda s: setattr(s, "query_start_loc", s.query_start_loc[1:]),
    "a scale for floats": lambda s: s.options.update(key_scale=torch.ones(s.key_cache.shape[:3])),
    "slopes of another size": lambda s: s.options.update(alibi_slopes=torch.ones(3)),
    "sinks of float64": lambda s: s.options.update(sinks=torch.ones(4).double()),
    "a window of nothing": lambda s: s.options.update(window=0),
    "a window without causal": lambda s: s.options.update(window=3, causal=False),
    "a negative cap": lambda s: s.options.update(softcap=-1.0),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_arguments_that_do_not_fit_say_what_was_expected(ops, name):
    step = scene(MIXED)
    BAD_SHAPES[name](step)
    with pytest.raises(KernelArgumentError, match=r"paged_attention: expected .*, got .*: "):
        ops.paged_attention(*step.arguments, **step.options)


def test_errors_of_the_reference_are_value_errors_too():
    step = scene(MIXED)
    step.seq_lens[0] = 10**6
    with pytest.raises(KernelArgumentError) as caught:
        load("reference").paged_attention(*step.arguments)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "features", [{}, {"alibi_slopes": torch.tensor([0.5, 0.25, 2.0, 1.0]) / 7}]
)
def test_the_reference_computes_float64(features):
    step = scene(MIXED, poison=None, **features)
    for name in ("query", "key_cache", "value_cache"):
        setattr(step, name, getattr(step, name).double())
    out, _ = load("reference").paged_attention(*step.arguments, **step.options)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, dense(step)[0], rtol=1e-12, atol=1e-12)
