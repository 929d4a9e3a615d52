"""The ops in compiled graphs: one of each, compiled once, no cache copied."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from compiled_attn.ops import NativeOps
from compiled_attn.ops.rows import stands_alone
from tests.compiled_attn.ops.kernels import BEST, SLOW, loaded
from tests.compiled_attn.ops.native_cases import MIXED
from tests.compiled_attn.ops.native_scene import assert_right, new_tokens, scene


@pytest.fixture(params=["reference", BEST, *SLOW], scope="module")
def traced(request) -> NativeOps:
    """The same for what a compiler sees of an op, which is one for all kernels."""
    return loaded(request.param)


def test_the_ops_pass_torchs_own_checks(traced):
    step = scene(MIXED, poison=0.5, cache_dtype=torch.int8, padding=1)
    key, value, slots = new_tokens(step)
    space = getattr(torch.ops, traced.namespace)
    torch.library.opcheck(space.paged_attention.default, step.arguments, step.options)
    arguments = (step.query, key, value, step.key_cache, step.value_cache, slots, *step.step)
    torch.library.opcheck(space.paged_attention_.default, arguments, step.options)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_both_ops_compile_in_one_full_graph_and_write_through(traced, backend):
    step = scene(MIXED, poison=0.5)
    key, value, slots = new_tokens(step)
    tables = (step.block_table, step.seq_lens, step.query_start_loc)

    def layer(query, key, value, key_cache, value_cache, slots, *tables):
        out, _ = traced.paged_attention_(
            query, key * 2, value, key_cache, value_cache, slots, *tables, step.scale
        )
        again, lse = traced.paged_attention(query, key_cache, value_cache, *tables, step.scale)
        return out + again, lse

    torch._dynamo.reset()
    arguments = (step.query, key, value, step.key_cache, step.value_cache, slots, *tables)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    out, lse = compiled(*arguments)
    assert_right((out / 2, lse), step)
    assert torch.equal(step.key_cache[slots[0] // 4, slots[0] % 4], key[0] * 2)


def test_new_numbers_of_the_same_shapes_compile_nothing(traced):
    counter = CompileCounter()
    torch._dynamo.reset()
    step = scene(MIXED, poison=0.5)
    compiled = torch.compile(
        lambda *a: traced.paged_attention(*a, 0.25), backend=counter, fullgraph=True, dynamic=False
    )
    for length in (9, 4, 1):
        step.seq_lens[0] = length
        compiled(*step.arguments[:-1])
    assert counter.frame_count == 1


@pytest.mark.parametrize("view", ["plain", "flat slots", "HND", "fused"])
def test_a_compiled_step_does_not_copy_the_caches(traced, view):
    step = scene(MIXED, poison=0.5)
    key, value, slots = new_tokens(step)
    blocks, size, heads, dim = 4096, 4, 2, 16
    storage = torch.zeros(2, blocks, size, heads, dim)
    shapes = {
        "plain": lambda x: x,
        "flat slots": lambda x: x.view(-1, heads, dim).view(blocks, size, heads, dim),
        "HND": lambda x: x.view(blocks, heads, size, dim).transpose(1, 2),
        "fused": lambda x: x,
    }
    fused = storage.view(blocks, size, 2, heads, dim)

    def layer(query, key, value, first, second, slots, *tables):
        if view == "fused":
            first, second = fused_views(first)
        else:
            first, second = shapes[view](first), shapes[view](second)
        return traced.paged_attention_(query, key, value, first, second, slots, *tables, 0.25)[0]

    def fused_views(whole):
        return whole[:, :, 0], whole[:, :, 1]

    torch._dynamo.reset()
    caches = (fused, fused) if view == "fused" else (storage[0].clone(), storage[1].clone())
    tables = (step.block_table, step.seq_lens, step.query_start_loc)
    arguments = (step.query, key, value, *caches, slots, *tables)
    _, codes = torch._inductor.utils.run_and_get_code(
        torch.compile(layer, fullgraph=True, dynamic=False), *arguments
    )
    elements = caches[0].numel()
    assert not _copies_of(codes, elements)


def _copies_of(codes: list[str], elements: int) -> list[str]:
    """Buffers of the size of a cache that generated code makes."""
    lines = [line for code in codes for line in code.splitlines() if "empty_strided" in line]
    sizes = (
        [int(n) for n in line.partition("((")[2].partition(")")[0].split(",") if n.strip()]
        for line in lines
        if "((" in line
    )
    return [str(size) for size in sizes if math.prod(size) >= elements // 2]


def test_only_a_dense_tensor_of_its_own_stands_alone():
    cache = torch.zeros(4, 3, 2)
    assert stands_alone(cache) and stands_alone(torch.empty_strided((4, 3, 2), (2, 8, 1)))
    assert not stands_alone(cache[1:]) and not stands_alone(cache.transpose(0, 1))
    assert not stands_alone(torch.empty_strided((4, 3, 2), (12, 4, 1)))
