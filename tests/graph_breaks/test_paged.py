"""Paged attention and cache writes in compiled graphs: whole, one a bucket, no cache copied."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code

from compiled_attn.compat.paged import (
    LAYOUTS,
    PARTITION,
    PagedAttention,
    paged_attention_reference,
    paged_attention_v1,
    paged_attention_v2,
    reshape_and_cache,
)
from graphs import capture
from tests.compiled_attn.compat.paged.scene import CODES, Step, caches, put
from tests.graph_breaks.tracing import allocations, aot_graph, cache_sized, calls
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BLOCKS, SIZE, KV_HEADS, HEADS, DIM = 300, 16, 2, 4, 64
CACHE = BLOCKS * SIZE * KV_HEADS * DIM


def module(layout: str = "packed", cached: tuple[Tensor, Tensor] | None = None, **options: Any):
    """The attention over caches of random numbers, with the portable kernel by default."""
    options = {"kernel": "portable", **options}
    generator = torch.Generator().manual_seed(1)
    if cached is None:
        cached = caches(layout, BLOCKS, SIZE, KV_HEADS, DIM, torch.float32)
    for cache in cached:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    scale = DIM**-0.5
    return PagedAttention(*cached, KV_HEADS, SIZE, scale, layout=layout, **options)  # type: ignore[arg-type]


def inputs(rows: int, width: int, seed: int = 0, heads: int = HEADS) -> tuple[Tensor, ...]:
    """A step of that bucket whose last row is padding; every row writes to its own last slot."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(BLOCKS, generator=generator)[: rows * width].view(rows, width)
    lengths = torch.randint(1, width * SIZE + 1, (rows,), generator=generator)
    last = lengths - 1
    slots = blocks.gather(1, (last // SIZE).unsqueeze(1)).squeeze(1) * SIZE + last % SIZE
    query = torch.randn(rows, heads, DIM, generator=generator)
    key, value = torch.randn(2, rows, KV_HEADS, DIM, generator=generator)
    for tensor, padding in (
        (query, math.nan),
        (blocks, -1),
        (lengths, 0),
        (slots, -1),
        (key, math.nan),
    ):
        tensor[-1] = padding
    return query, blocks.int(), lengths.int(), key, value, slots


def by_reference(attention: PagedAttention, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a step must give, and what it must leave in both caches, by writes token by token."""
    query, tables, lengths, key, value, slots = given
    both = attention.key_cache.clone(), attention.value_cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            put_one(*both, attention.layout, slot, key[row], value[row])
    out = paged_attention_reference(
        query, *both, attention.scale, tables, lengths, SIZE, layout=attention.layout
    )
    return out, *both


def put_one(key_cache, value_cache, layout: str, slot: int, key: Tensor, value: Tensor) -> None:
    block, offset = (0, slot) if layout == "flat" else divmod(slot, SIZE)
    put(key_cache, value_cache, layout, block, offset, key, value)


def assert_a_step_equals_the_reference(attention: PagedAttention, run: Any, seed: int = 0) -> None:
    given = inputs(3, 5, seed)
    out, key_cache, value_cache = by_reference(attention, given)
    got = run(*given)
    torch.testing.assert_close(got, out, atol=2e-6, rtol=1e-5)
    assert not got[-1].any()
    assert torch.equal(attention.key_cache, key_cache)
    assert torch.equal(attention.value_cache, value_cache)


@pytest.mark.parametrize("layout", slow_but(("packed",), LAYOUTS))
@pytest.mark.parametrize("partition", slow_but((32,), (None, 32)))
def test_two_buckets_are_exactly_two_full_graphs(layout, partition):
    counter = CompileCounter()
    attention = module(layout, partition=partition)
    compiled = torch.compile(attention, backend=counter, fullgraph=True, dynamic=False)
    for seed in range(3):
        for rows, width in ((2, 8), (4, 10)):
            compiled(*inputs(rows, width, seed))
    assert counter.frame_count == 2


@pytest.mark.parametrize("function", [paged_attention_v1, paged_attention_v2])
def test_each_function_is_one_full_graph_for_a_bucket(function):
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=False)
    for width in (1, 3):
        for seed in range(3):
            step = Step(seed, lengths=(4, 1 + seed, 3), extra_width=width).make()
            partials = step.partials(PARTITION) if function is paged_attention_v2 else ()
            compiled(torch.empty_like(step.query), *partials, *step.args())
    assert counter.frame_count == 2


@pytest.mark.parametrize("layout", slow_but(("packed",), LAYOUTS))
def test_without_dynamic_false_two_graphs_serve_every_bucket(layout):
    # The second bucket makes Dynamo's graph of symbolic sizes, and that serves the others.
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
def test_a_step_equals_the_reference_and_shows_its_writes(backend, layout):
    attention = module(layout)
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=False)
    for seed in range(3):
        assert_a_step_equals_the_reference(attention, compiled, seed)


@pytest.mark.parametrize(
    ("layout", "heads", "rows", "width"),
    [
        ("NHD", 32, 2, 40),
        pytest.param("packed", 4, 2, 40, marks=pytest.mark.slow),
        pytest.param("NHD", 4, 2, 40, marks=pytest.mark.slow),
        pytest.param("HND", 4, 2, 40, marks=pytest.mark.slow),
        pytest.param("packed", 32, 2, 40, marks=pytest.mark.slow),
        pytest.param("packed", 8, 16, 2, marks=pytest.mark.slow),
    ],
)
def test_inductor_equals_the_reference_and_stores_nothing_of_the_size_of_the_keys(
    layout, heads, rows, width
):
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


@pytest.mark.slow  # test_backends_equal captures it with aot_eager, inductor compiles it above
def test_captured_by_graphs_it_equals_the_reference():
    attention = module("packed", partition=32)
    with torch.no_grad():
        graph = capture(attention, inputs(3, 5, seed=7), backend="inductor")
        for seed in range(2):
            assert_a_step_equals_the_reference(attention, graph.run, seed)


@pytest.mark.parametrize("backend", slow_but(("aot_eager",), ("eager", "aot_eager", "inductor")))
def test_the_second_version_equals_float64_attention(backend):
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
def test_quantised_caches_of_half_precision_models_are_exact(backend):
    scales = {"k_scale": torch.tensor([0.03, 0.05]), "v_scale": torch.tensor(0.04)}
    step = Step(lengths=(70, 0, 9), kv_cache_dtype="fp8", dtype=torch.bfloat16, **scales).make()
    compiled = torch.compile(paged_attention_v1, backend=backend, fullgraph=True, dynamic=False)
    out = torch.full_like(step.query, math.nan)
    compiled(out, *step.args())
    step.assert_exact(out)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_quantised_tokens_are_written_as_eagerly(kv_cache_dtype):
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
def test_a_row_that_cannot_be_served_is_nan_and_no_other_is_touched(backend):
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
def test_slots_outside_of_the_cache_are_not_written(layout, slots):
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


def test_a_wider_bucket_changes_results_by_rounding_only():
    attention = module()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=False)
    query, tables, lengths = inputs(3, 5)[:3]
    narrow = compiled(query, tables, lengths)
    junk = torch.full((3, 9), -1, dtype=torch.int32)
    wide = compiled(query, torch.cat([tables, junk], 1), lengths)
    assert (wide - narrow).abs().max() <= 1e-6
    assert narrow.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_updates_each_cache_by_index_put_alone(layout):
    # Inductor does these two in place: see the buffers that it allocates, above.
    assert cache_sized(aot_graph(module(layout), *inputs(2, 8)), CACHE) == [
        "index_put",
        "index_put",
    ]


@pytest.mark.parametrize("layout", slow_but(("packed", "HND"), LAYOUTS))
def test_attention_without_a_write_makes_nothing_of_the_size_of_the_cache(layout):
    assert cache_sized(aot_graph(module(layout), *inputs(2, 8)[:3]), CACHE) == []


def test_the_native_kernel_is_one_op_of_a_full_graph():
    graph = aot_graph(module("HND", kernel="native"), *inputs(2, 8)[:3])
    ops = [str(node.target) for node in calls(graph)]
    assert sum("paged_attention" in op for op in ops) == 1 and cache_sized(graph, CACHE) == []


FUSED = {
    "stacked": ("packed", (2, CACHE)),
    "fused": ("NHD", (BLOCKS, 2, SIZE, KV_HEADS, DIM)),
    "fused by head": ("HND", (BLOCKS, 2, KV_HEADS, SIZE, DIM)),
}


def fused_module(kind: str) -> PagedAttention:
    """The attention over two views of one buffer."""
    layout, shape = FUSED[kind]
    buffer = torch.zeros(shape)
    if kind == "stacked":
        own = caches(layout, BLOCKS, SIZE, KV_HEADS, DIM, torch.float32)
        return module(layout, (buffer[0].view(own[0].shape), buffer[1].view(own[1].shape)))
    return module(layout, (buffer[:, 0], buffer[:, 1]))


@pytest.mark.parametrize("kind", FUSED)
def test_caches_in_one_buffer_are_written_by_the_op_and_not_scattered_back(kind):
    ops = cache_sized(aot_graph(fused_module(kind), *inputs(2, 8)), CACHE)
    assert ops
    assert set(ops) == {"getitem"}  # what the op gives back


@pytest.mark.parametrize("kind", FUSED)
def test_caches_in_one_buffer_equal_the_reference(kind):
    attention = fused_module(kind)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_a_step_equals_the_reference(attention, compiled)


def test_inductor_does_not_copy_caches_in_one_buffer():
    attention = fused_module("fused")
    given = inputs(2, 8)
    out, *cached = by_reference(attention, given)
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    got, (code,) = run_and_get_code(compiled, *given)
    torch.testing.assert_close(got, out, atol=2e-6, rtol=1e-5)
    assert torch.equal(attention.key_cache, cached[0])
    assert max(allocations(code)) < CACHE
