"""Graphs and generated code of compiled functions, for assertions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.fx import GraphModule, Node

VIEWS = {"as_strided", "view", "select", "slice", "permute", "alias", "transpose", "copy_"}


def dynamo_graph(function: Callable[..., Any], *args: Any) -> GraphModule:
    """The only graph that Dynamo captures."""
    recorder = EagerAndRecordGraphs()
    torch.compile(function, backend=recorder, fullgraph=True, dynamic=False)(*args)
    (graph,) = recorder.graphs
    return graph


def aot_graph(function: Callable[..., Any], *args: Any, **options: Any) -> GraphModule:
    """The only graph after AOTAutograd has made in-place updates functional."""
    graphs: list[GraphModule] = []

    def record(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=record, **options)
    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)
    (graph,) = graphs
    return graph


def calls(graph: GraphModule) -> Iterable[Node]:
    return (node for node in graph.graph.nodes if node.op in ("call_function", "call_method"))


def op_name(target: Any) -> str:
    """The name of what a node calls."""
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    name: str = target if isinstance(target, str) else target.__name__
    return "eq" if name == "__eq__" else name  # so torch 2.11 writes it


def cache_sized(graph: GraphModule, at_least: int) -> list[str]:
    """Ops whose result has at least `at_least` elements, without views and final writes."""
    return [
        name
        for node in calls(graph)
        if isinstance(value := node.meta.get("val"), Tensor) and value.numel() >= at_least
        if (name := op_name(node.target)) not in VIEWS
    ]


def allocations(code: str) -> list[int]:
    """Elements of each buffer that generated code allocates."""
    shapes = re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", code)
    return [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes]


def loop_ends(code: str) -> list[int]:
    """Ends of the loops of generated C++."""
    return [int(end) for end in re.findall(r"< ?static_cast<int64_t>\((\d+)L\)", code)]
