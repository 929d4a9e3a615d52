"""Swap lists in compiled graphs: whole, one a pad size, no buffer of the size of the cache."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code

from compiled_attn import PagedKVCache
from compiled_attn.cache.defrag import BlockSwap
from tests.graph_breaks.tracing import aot_graph, calls, dynamo_graph, loop_ends

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BLOCKS, SIZE, HEADS, DIM = 331, 4, 2, 16  # a prime, found in no other size
WORDS = SIZE * HEADS * DIM * 4 // 8  # 64-bit words of a block of a float32 layer's keys
PAIRS = 8


def a_swap(layers: int = 2, **options: Any) -> tuple[BlockSwap, PagedKVCache]:
    cache = PagedKVCache(layers, BLOCKS, SIZE, HEADS, DIM)
    for tensor in cache.buffers():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    return BlockSwap(cache, **options), cache


def lists(pairs: int = PAIRS) -> tuple[Tensor, Tensor]:
    ids = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(pairs)) + 1
    return ids[:pairs].clone(), ids[pairs : 2 * pairs].clone()


@pytest.mark.parametrize("name", ["forward", "overwrite"])
def test_two_pad_sizes_are_exactly_two_full_graphs(name):
    swap, _ = a_swap()
    counter = CompileCounter()
    function = getattr(swap, name)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=False)
    for pairs in (8, 16, 8, 16):
        compiled(*lists(pairs))
    assert counter.frame_count == 2


@pytest.mark.parametrize(("name", "writes"), [("forward", 2), ("overwrite", 1)])
def test_only_the_writes_of_a_functional_graph_have_the_size_of_the_cache(name, writes):
    swap, cache = a_swap()
    graph = aot_graph(getattr(swap, name), *lists(), keep_inference_input_mutations=True)
    sized = Counter(
        str(node.target)
        for node in graph.graph.nodes
        if node.op == "call_function"
        and isinstance(node.meta.get("val"), Tensor)
        and node.meta["val"].numel() % BLOCKS == 0
    )
    tensors = len(list(cache.buffers()))
    assert sized == {"aten.index_copy.default": writes * tensors, "aten.copy_.default": tensors}


def test_inductor_makes_buffers_of_the_pad_size_to_exchange_and_none_to_move(one_thread):
    swap, cache = a_swap(pad_sizes=(PAIRS,), backend="inductor")
    before = [tensor.clone().unflatten(0, (BLOCKS, SIZE)) for tensor in cache.buffers()]
    report, codes = run_and_get_code(swap.warmup)
    assert report.compiles == len(codes) == 2
    # One side of an exchange is gathered for each tensor. A move needs nothing: no destination is a
    # source, so blocks are copied directly.
    assert [made(code) for code in codes] == [[(PAIRS, WORDS)] * 4, []]
    for code in codes:
        loops = loop_ends(code)
        assert set(loops) >= {PAIRS, WORDS}
        assert not [size for size in loops if size >= BLOCKS]
        assert "copy_(" not in code.replace("index_copy_", "")
    sources, destinations = (ids.tolist() for ids in lists())
    swap.swap(list(zip(sources, destinations, strict=True)))
    for tensor, old in zip(cache.buffers(), before, strict=True):
        new = tensor.unflatten(0, (BLOCKS, SIZE))
        assert torch.equal(new[sources], old[destinations])
        assert torch.equal(new[destinations], old[sources])


def made(code: str) -> list[tuple[int, ...]]:
    """Shapes of the buffers that a graph makes."""
    shapes = re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", code.split("def get_args")[0])
    found = [tuple(int(n) for n in shape.split(",") if n.strip()) for shape in shapes]
    assert not [shape for shape in found if math.prod(shape) >= BLOCKS * WORDS]
    return found


class TestSnapshot(expecttest.TestCase):
    def test_operations_of_an_exchange(self):
        self.assertExpectedInline(
            captured(a_swap(layers=1)[0]),
            """\
index_select int64[8, 64]
index_select int64[8, 64]
index_copy_ int64[331, 64]
index_copy_ int64[331, 64]
index_select int64[8, 64]
index_select int64[8, 64]
index_copy_ int64[331, 64]
index_copy_ int64[331, 64]""",
        )

    def test_operations_of_a_move(self):
        self.assertExpectedInline(
            captured(a_swap(layers=1)[0].overwrite),
            """\
index_select int64[8, 64]
index_copy_ int64[331, 64]
index_select int64[8, 64]
index_copy_ int64[331, 64]""",
        )


def captured(function: Callable[..., None]) -> str:
    """The operations of the captured graph, with dtype and shape of each result."""
    shown = [
        (node.target, node.meta["example_value"])
        for node in calls(dynamo_graph(function, *lists()))
    ]
    return "\n".join(f"{name} {str(v.dtype)[6:]}{list(v.shape)}" for name, v in shown)
