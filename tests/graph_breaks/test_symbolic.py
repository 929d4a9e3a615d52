"""Steps of the native kernel captured with symbolic sizes: whole, once, and with no size fixed."""

from __future__ import annotations

import re
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from compiled_attn.ops import load
from compiled_attn.step import TableBatch
from graphs import Bucket, WarmupManager, explicit
from graphs.backends.inductor import InductorBackend

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_gradients")

AXES = ("tokens", "requests")
SPACE = explicit(AXES, [(2, 2), (8, 4), (16, 4), (32, 8)])
CACHE = torch.zeros(5, 4, 1, 8)


def attend(query: Tensor, *fields: Tensor) -> Tensor:
    """Attention of a step, and the rows that need logits."""
    step = TableBatch(*fields)
    out, _ = torch.ops.compiled_attn.paged_attention(
        query, CACHE, CACHE, step.block_tables, step.seq_lens, step.query_start_loc, 0.5
    )
    return out[step.logits_index] * 2


def inputs_of(bucket: Bucket) -> list[Tensor]:
    query = torch.randn(bucket.tokens, 2, 8)
    return [query, *TableBatch.padding(bucket, 3)]


def _described(graph: GraphModule) -> str:
    """A line for each tensor of a graph: its op, its shape with symbols as n0, n1, ..."""
    lines = [
        f"{getattr(node.target, '__name__', node.op)} {list(value.shape)}"
        for node in graph.graph.nodes
        if isinstance(value := node.meta.get("example_value"), Tensor)
    ]
    symbols: dict[str, str] = {}
    return re.sub(
        r"\bs\d+\b", lambda s: symbols.setdefault(s[0], f"n{len(symbols)}"), "\n".join(lines)
    )


def test_the_graph_is_whole_and_leaves_every_size_of_a_bucket_open():
    load()
    graphs: list[str] = []

    def record(graph: GraphModule, _: Any) -> Any:
        graphs.append(_described(graph))
        return graph.forward

    backend = InductorBackend("recording", record)
    manager = WarmupManager(attend, SPACE, inputs_of, backend=backend, symbolic=AXES)
    report = manager.warmup()
    assert report.graphs == report.compiles == len(graphs) == 1
    expecttest.assert_expected_inline(
        graphs[0],
        """\
placeholder [n0, 2, 8]
placeholder [5, 4, 1, 8]
placeholder [n1, 3]
placeholder [n2]
placeholder [n3]
placeholder [n4]
getitem [n0, 2, 8]
getitem [n4, 2, 8]
mul [n4, 2, 8]""",
    )
    for bucket in SPACE:
        inputs = inputs_of(bucket)
        torch.testing.assert_close(manager.run(bucket, *inputs), attend(*inputs))
