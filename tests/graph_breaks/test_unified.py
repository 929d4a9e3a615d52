"""Unified attention in compiled graphs: whole, one a bucket, no cache copied, writes visible."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

import expecttest
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

from compiled_attn import BatchBuilder, PagedKVCache, StepBatch, UnifiedAttention
from graphs import capture
from tests.oracle import Scene, Shape

SHAPE = Shape(block_size=16, kv_heads=2, group=2, head_dim=32, num_blocks=300)
CACHE_ELEMENTS = 300 * 16 * 2 * 32
BUCKETS = (
    {"tokens": 48, "shared": 16, "unique": 24, "logits": 8},
    {"tokens": 64, "shared": 20, "unique": 32, "logits": 8},
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Step(nn.Module):
    """A step as an engine would capture it: tensors in, the metadata made inside of the graph."""

    def __init__(self, scene: Scene, **options) -> None:
        super().__init__()
        s = scene.shape
        self.cache = PagedKVCache(1, s.num_blocks, s.block_size, s.kv_heads, s.head_dim)
        self.attention = UnifiedAttention(self.cache, **options)
        self.reload(scene)

    def reload(self, scene: Scene) -> None:
        self.cache.key(0).copy_(scene.key_cache)
        self.cache.value(0).copy_(scene.value_cache)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *step: Tensor | None) -> Tensor:
        metadata = StepBatch(*step).metadata(self.cache.block_size)
        return self.attention(query, key, value, metadata)


def _inputs(scene: Scene, bucket: dict[str, int]) -> tuple[Tensor | None, ...]:
    step = BatchBuilder(SHAPE.num_blocks, SHAPE.block_size).build(scene.requests, bucket)
    return (*scene.flat(bucket["tokens"]), *step)


def _aot_graph(module: nn.Module, inputs: tuple[Tensor | None, ...]) -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: list[Tensor]) -> GraphModule:
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        compiled(*inputs)
    assert len(graphs) == 1
    return graphs[0]


def test_two_buckets_are_exactly_two_full_graphs():
    counter = CompileCounter()
    module = Step(Scene(0, SHAPE).random())
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=False)
    for seed in range(3):
        for bucket in BUCKETS:
            compiled(*_inputs(Scene(seed, SHAPE).random(), bucket))
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("eager", {}),
        ("aot_eager", {}),
        ("aot_eager", {"sliding_window": 20, "softcap": 2.0}),
        ("inductor", {}),
    ],
)
def test_a_captured_step_equals_the_oracle_and_its_writes_are_visible(backend, options):
    scene = Scene(3, SHAPE).random()
    module, inputs = Step(scene, **options), _inputs(scene, BUCKETS[0])
    with torch.no_grad():
        graph = capture(module, inputs, backend=backend)
        for seed in (4, 5):
            scene = Scene(seed, SHAPE).random()
            module.reload(scene)
            inputs = _inputs(scene, BUCKETS[0])
            out = graph.run(*inputs)
            expected, _ = scene.expected(
                window=options.get("sliding_window"), softcap=options.get("softcap")
            )
            torch.testing.assert_close(
                out[: len(expected)].double(), expected, atol=5e-6, rtol=5e-6
            )
            slots = StepBatch(*inputs[3:]).slot_mapping[: len(expected)]
            assert torch.equal(module.cache.key(0)[slots], inputs[1][: len(expected)])


def test_only_the_two_writes_of_the_graph_have_the_size_of_the_cache():
    scene = Scene(0, SHAPE).random()
    graph = _aot_graph(Step(scene), _inputs(scene, BUCKETS[0]))
    cache_sized = Counter(
        node.target
        for node in graph.graph.nodes
        if node.op == "call_function"
        and isinstance(node.meta.get("val"), Tensor)
        and node.meta["val"].numel() >= CACHE_ELEMENTS
        and node.target is not torch.ops.aten.view.default
    )
    assert cache_sized == {
        torch.ops.aten.index_copy.default: 2,
        torch.ops.aten.copy_.default: 2,
    }


def test_inductor_does_these_writes_in_place_without_a_buffer_of_the_size_of_the_cache():
    scene = Scene(0, SHAPE).random()
    compiled = torch.compile(Step(scene), fullgraph=True, dynamic=False)
    with torch.no_grad():
        _, codes = run_and_get_code(compiled, *_inputs(scene, BUCKETS[0]))
    shapes = re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", "".join(codes))
    sizes = [math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]
    assert sizes and max(sizes) < CACHE_ELEMENTS


class TestSnapshot(expecttest.TestCase):
    def test_operations_of_a_decode_step(self):
        scene = Scene(0, SHAPE).add(20, 1).add(33, 1)
        bucket = {"tokens": 4, "shared": 0, "unique": 8, "logits": 4, "causal": 0}
        graph = _aot_graph(Step(scene), _inputs(scene, bucket))
        named = Counter(
            str(node.target).removeprefix("aten.").removesuffix(".default").split(".")[0]
            for node in graph.graph.nodes
            if node.op == "call_function"
        )
        # What moves data or computes; shapes, constants and comparisons vary with torch's version.
        kinds = ("bmm", "mm", "index", "index_put", "index_copy", "exp", "amax", "copy_", "sum")
        self.assertExpectedInline(
            "\n".join(f"{kind}: {named[kind]}" for kind in kinds if named[kind]) + "\n",
            """\
bmm: 1
mm: 4
index: 3
index_copy: 2
exp: 4
amax: 5
copy_: 2
sum: 2
""",
        )
