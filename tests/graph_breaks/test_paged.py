"""Paged attention and cache writes in compiled graphs: whole, one a bucket, no cache copied."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code

from compiled_attn.compat.paged import (
    LAYOUTS,
    PARTITION,
    paged_attention_reference,
    paged_attention_v1,
    paged_attention_v2,
    reshape_and_cache,
)
from graphs import capture
from tests.compiled_attn.compat.paged.scene import CODES, Step, caches
from tests.graph_breaks.paged_scene import (
    CACHE,
    DIM,
    HEADS,
    KV_HEADS,
    SIZE,
    assert_a_step_equals_the_reference,
    by_reference,
    inputs,
    module,
    put_one,
)
from tests.graph_breaks.tracing import allocations
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("layout", slow_but(("packed",), LAYOUTS))
@pytest.mark.parametrize("partition", slow_but((32,), (None, 32)))
def test_two_buckets_are_exactly_two_full_graphs(layout: str, partition: int | None) -> None:
    counter = CompileCounter()
    attention = module(layout, partition=partition)
    compiled = torch.compile(attention, backend=counter, fullgraph=True, dynamic=False)
    for seed in range(3):
        for rows, width in ((2, 8), (4, 10)):
            compiled(*inputs(rows, width, seed))
    assert counter.frame_count == 2


@pytest.mark.parametrize("function", [paged_attention_v1, paged_attention_v2])
def test_each_function_is_one_full_graph_for_a_bucket(function: Callable[..., Tensor]) -> None:
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=False)
    for width in (1, 3):
        for seed in range(3):
            step = Step(seed, lengths=(4, 1 + seed, 3), extra_width=width).make()
            partials = step.partials(PARTITION) if function is paged_attention_v2 else ()
            compiled(torch.empty_like(step.query), *partials, *step.args())
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    "function",
    [paged_attention_v1, pytest.param(paged_attention_v2, marks=pytest.mark.slow)],
)
def test_without_a_word_about_shapes_two_graphs_serve_every_bucket(
    function: Callable[..., Tensor],
) -> None:
    # The second bucket makes Dynamo's graph of open sizes, and that serves the others.
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    attention = module()
    cached = attention.key_cache, attention.value_cache
    for rows, width in ((2, 8), (4, 10), (3, 6)):
        query, tables, lengths, *_ = inputs(rows, width)
        parts = -(-width * 100 // PARTITION)
        buffers = [torch.empty(rows, HEADS, parts) for _ in range(2)]
        buffers.append(torch.empty(rows, HEADS, parts, DIM))
        out = torch.empty_like(query)
        compiled(
            out, *(buffers if function is paged_attention_v2 else ()), query, *cached, KV_HEADS,
            0.1, tables, lengths, SIZE, width * 100, None, "auto", 1.0, 1.0,
        )  # fmt: skip
        right = paged_attention_reference(query, *cached, 0.1, tables, lengths, SIZE)
        torch.testing.assert_close(out, right, atol=2e-6, rtol=1e-5)
    assert counter.frame_count == 2


@pytest.mark.parametrize("layout", slow_but(("packed",), LAYOUTS))
def test_a_module_without_a_word_about_shapes_is_two_graphs(layout: str) -> None:
    counter = CompileCounter()
    attention = module(layout)
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for rows, width in ((2, 8), (4, 10), (3, 6)):
        given = inputs(rows, width)
        out, *cached = by_reference(attention, given)
        torch.testing.assert_close(compiled(*given), out, atol=2e-6, rtol=1e-5)
        assert torch.equal(attention.key_cache, cached[0])
        assert torch.equal(attention.value_cache, cached[1])
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", slow_but(("aot_eager",), ("eager", "aot_eager")))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_equals_the_reference_and_shows_its_writes(backend: str, layout: str) -> None:
    attention = module(layout)
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=False)
    for seed in range(3):
        assert_a_step_equals_the_reference(attention, compiled, seed)


@pytest.mark.parametrize(
    ("layout", "heads", "rows", "width"),
    [
        ("packed", 4, 2, 40),
        ("NHD", 32, 2, 40),
        pytest.param("NHD", 4, 2, 40, marks=pytest.mark.slow),
        pytest.param("HND", 4, 2, 40, marks=pytest.mark.slow),
        pytest.param("packed", 32, 2, 40, marks=pytest.mark.slow),
        pytest.param("packed", 8, 16, 2, marks=pytest.mark.slow),
    ],
)
def test_inductor_equals_the_reference_and_stores_nothing_of_the_size_of_the_keys(
    layout: str, heads: int, rows: int, width: int
) -> None:
    attention = module(layout)
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    given = inputs(rows, width, heads=heads)
    out, *cached = by_reference(attention, given)
    got, (code,) = run_and_get_code(compiled, *given)
    torch.testing.assert_close(got, out, atol=2e-6, rtol=1e-5)
    assert torch.equal(attention.key_cache, cached[0])
    assert torch.equal(attention.value_cache, cached[1])
    numels = allocations(code)
    gathered = rows * width * SIZE * KV_HEADS * DIM
    assert max(numels) >= rows * heads * DIM  # the output at least is found
    assert max(numels) <= gathered // 2 < CACHE


def test_captured_by_graphs_it_equals_the_reference() -> None:
    attention = module("packed", partition=32)
    with torch.no_grad():
        graph = capture(attention, inputs(3, 5, seed=7), backend="inductor")
        for seed in range(2):
            assert_a_step_equals_the_reference(attention, graph.run, seed)


@pytest.mark.parametrize("backend", slow_but(("aot_eager",), ("eager", "aot_eager", "inductor")))
def test_the_second_version_equals_float64_attention(backend: str) -> None:
    step = Step(lengths=(70, 0, 513, 512), block_size=32, alibi=True, poison=math.inf).make()
    compiled = torch.compile(paged_attention_v2, backend=backend, fullgraph=True, dynamic=False)
    out, partials = torch.full_like(step.query, math.nan), step.partials(PARTITION)
    eager = step.partials(PARTITION)
    paged_attention_v2(torch.empty_like(out), *eager, *step.args())
    assert compiled(out, *partials, *step.args()).data_ptr() == out.data_ptr()
    step.assert_exact(out)
    for got, expected in zip(partials, eager, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", slow_but(("inductor",), ("aot_eager", "inductor")))
def test_quantised_caches_of_half_precision_models_are_exact(backend: str) -> None:
    scales = {"k_scale": torch.tensor([0.03, 0.05]), "v_scale": torch.tensor(0.04)}
    step = Step(lengths=(70, 0, 9), kv_cache_dtype="fp8", dtype=torch.bfloat16, **scales).make()
    compiled = torch.compile(paged_attention_v1, backend=backend, fullgraph=True, dynamic=False)
    out = torch.full_like(step.query, math.nan)
    compiled(out, *step.args())
    step.assert_exact(out)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_quantised_tokens_are_written_as_eagerly(kv_cache_dtype: str) -> None:
    compiled = torch.compile(reshape_and_cache, backend="aot_eager", fullgraph=True, dynamic=False)
    stored = CODES.get(kv_cache_dtype, torch.int8)
    both = [caches("packed", 5, 4, KV_HEADS, DIM, stored) for _ in range(2)]
    key, value = torch.randn(2, 4, KV_HEADS, DIM) * 100
    slots = torch.tensor([7, -1, 19, 0])
    for function, cached in zip((reshape_and_cache, compiled), both, strict=True):
        function(key, value, *cached, slots, kv_cache_dtype, 0.5, torch.tensor([0.1, 0.2]))
    for eager, graph in zip(*both, strict=True):
        assert torch.equal(eager.view(torch.uint8), graph.view(torch.uint8))
        assert eager.view(torch.uint8).any()


@pytest.mark.parametrize("backend", slow_but(("inductor",), ("aot_eager", "inductor")))
def test_a_row_that_cannot_be_served_is_nan_and_no_other_is_touched(backend: str) -> None:
    compiled = torch.compile(paged_attention_v1, backend=backend, fullgraph=True, dynamic=False)
    step = Step(lengths=(5, 0, 9, 8, 4, 2), extra_width=0).make()
    expected = step.expected()
    step.block_tables[0, 1] = step.blocks  # beyond the cache
    step.block_tables[2, 2] = -1
    step.seq_lens[3] = 13  # beyond the table
    step.seq_lens[4] = -1
    out = torch.empty_like(step.query)
    compiled(out, *step.args())
    assert out[[0, 2, 3, 4]].isnan().all()
    torch.testing.assert_close(out[[1, 5]].double(), expected[[1, 5]], atol=1e-6, rtol=1e-5)
    assert not out[1].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "slots", slow_but(([-1, 3, 80],), ([-1, 3, 80], [-1, -1, 80], [79, -5, 0]))
)
def test_slots_outside_of_the_cache_are_not_written(layout: str, slots: list[int]) -> None:
    compiled = torch.compile(reshape_and_cache, backend="aot_eager", fullgraph=True, dynamic=False)
    both = caches(layout, 5, 16, KV_HEADS, DIM, torch.float32)
    expected = [cache.clone() for cache in both]
    key, value = torch.randn(2, 3, KV_HEADS, DIM)
    for row, slot in enumerate(slots):
        if 0 <= slot < 80:
            put_one(*expected, layout, slot, key[row], value[row])
    compiled(key, value, *both, torch.tensor(slots), "auto", 1.0, 1.0, layout=layout)
    for cache, right in zip(both, expected, strict=True):
        assert torch.equal(cache, right)


def test_a_wider_bucket_changes_results_by_rounding_only() -> None:
    attention = module()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=False)
    query, tables, lengths = inputs(3, 5)[:3]
    narrow = compiled(query, tables, lengths)
    junk = torch.full((3, 9), -1, dtype=torch.int32)
    wide = compiled(query, torch.cat([tables, junk], 1), lengths)
    assert (wide - narrow).abs().max() <= 1e-6
    assert narrow.any()
