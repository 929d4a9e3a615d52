"""The inputs of a graph as Dynamo traced them, with symbolic sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

__all__ = ["traced_inputs"]


def traced_inputs(graph: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Return the fake tensors and symbolic sizes of a graph's inputs; examples where it has none.

    Dynamo passes real tensors to a backend, whose sizes are plain numbers.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    pairs = zip(nodes, example_inputs, strict=True)
    return [node.meta.get("example_value", example) for node, example in pairs]
