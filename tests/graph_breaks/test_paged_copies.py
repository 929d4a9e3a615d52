"""Paged attention in compiled graphs copies no cache, also of two in one buffer."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from compiled_attn.compat.paged import (
    LAYOUTS,
    PagedAttention,
)
from tests.compiled_attn.compat.paged.scene import caches
from tests.graph_breaks.paged_scene import (
    BLOCKS,
    CACHE,
    DIM,
    KV_HEADS,
    SIZE,
    assert_a_step_equals_the_reference,
    by_reference,
    inputs,
    module,
)
from tests.graph_breaks.tracing import allocations, aot_graph, cache_sized, calls
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_updates_each_cache_by_index_put_alone(layout: str) -> None:
    # Inductor does these two in place: see what it stores, above.
    assert cache_sized(aot_graph(module(layout), *inputs(2, 8)), CACHE) == [
        "index_put",
        "index_put",
    ]


@pytest.mark.parametrize("layout", slow_but(("packed", "HND"), LAYOUTS))
def test_attention_without_a_write_makes_nothing_of_the_size_of_the_cache(layout: str) -> None:
    assert cache_sized(aot_graph(module(layout), *inputs(2, 8)[:3]), CACHE) == []


def test_the_native_kernel_is_one_op_of_a_full_graph() -> None:
    graph = aot_graph(module("HND", kernel="native"), *inputs(2, 8)[:3])
    ops = [str(node.target) for node in calls(graph)]
    assert sum("paged_attention" in op for op in ops) == 1 and cache_sized(graph, CACHE) == []


FUSED = {
    "two halves": ("packed", (2, CACHE)),
    "fused": ("NHD", (BLOCKS, 2, SIZE, KV_HEADS, DIM)),
    "fused by head": ("HND", (BLOCKS, 2, KV_HEADS, SIZE, DIM)),
}


def fused_module(kind: str) -> PagedAttention:
    """The attention over two views of one buffer."""
    layout, shape = FUSED[kind]
    buffer = torch.zeros(shape)
    if kind == "two halves":
        own = caches(layout, BLOCKS, SIZE, KV_HEADS, DIM, torch.float32)
        return module(layout, (buffer[0].view(own[0].shape), buffer[1].view(own[1].shape)))
    return module(layout, (buffer[:, 0], buffer[:, 1]))


@pytest.mark.parametrize("kind", FUSED)
def test_caches_in_one_buffer_are_written_by_the_op_and_not_scattered_back(kind: str) -> None:
    ops = cache_sized(aot_graph(fused_module(kind), *inputs(2, 8)), CACHE)
    assert ops
    assert set(ops) == {"getitem"}  # what the op gives back


@pytest.mark.parametrize("kind", FUSED)
def test_caches_in_one_buffer_equal_the_reference(kind: str) -> None:
    attention = fused_module(kind)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_a_step_equals_the_reference(attention, compiled)


def test_inductor_does_not_copy_caches_in_one_buffer() -> None:
    attention = fused_module("fused")
    given = inputs(2, 8)
    out, *cached = by_reference(attention, given)
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    got, (code,) = run_and_get_code(compiled, *given)
    torch.testing.assert_close(got, out, atol=2e-6, rtol=1e-5)
    assert torch.equal(attention.key_cache, cached[0])
    assert max(allocations(code)) < CACHE
