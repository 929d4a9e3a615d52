"""A check whether an ONNX model may write a result over the input whose new value it is.

ONNX has no updates in place. A cache that a graph updates goes in as an input and comes out as a
result, and binding both to one address saves a copy of the whole cache: `ScatterND` then writes the
new rows only. It is right only if nothing reads the old cache after that write. ONNX Runtime orders
nodes by their data alone, so the one thing that keeps a reader before the write is that the write
needs what was read.
"""

from __future__ import annotations

from typing import Any

__all__ = ["may_alias"]

_IN_PLACE = frozenset(("ScatterND", "ScatterElements"))
"""Copy their first input unless it is the result already, then write elements."""

_MAY_SHARE = frozenset(
    ("Cast", "Dropout", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
)
"""May give the memory of their first input another shape."""


def may_alias(graph: Any, input_name: str, output_name: str) -> bool:
    """Whether `output_name` may be written to the memory of `input_name`.

    Args:
        graph: the `onnx.GraphProto` as ONNX Runtime runs it, its own optimisations done.

    Returns:
        True if every node that reads the input, or what may share its memory, feeds the node that
        makes the output, and that node writes in place. False in case of doubt.
    """
    nodes = list(graph.node)
    if any(attribute.g.node or attribute.graphs for node in nodes for attribute in node.attribute):
        return False  # a branch or loop reads by name whatever is around it
    producers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    final = producers.get(output_name)
    if final is None:
        return False
    shared = _sharing(nodes, input_name)
    readers = {i for i, node in enumerate(nodes) if shared.intersection(node.input)}
    if not readers <= _needed_by(final, nodes, producers):
        return False
    return final not in readers or _writes_in_place(nodes[final], shared)


def _sharing(nodes: list[Any], name: str) -> set[str]:
    shared = {name}
    for node in nodes:  # in the order that they run
        if node.op_type in _MAY_SHARE and node.input and node.input[0] in shared:
            shared.update(node.output)
    return shared


def _needed_by(final: int, nodes: list[Any], producers: dict[str, int]) -> set[int]:
    needed, todo = {final}, [final]
    while todo:
        for name in nodes[todo.pop()].input:
            source = producers.get(name)
            if source is not None and source not in needed:
                needed.add(source)
                todo.append(source)
    return needed


def _writes_in_place(node: Any, shared: set[str]) -> bool:
    return node.op_type in _IN_PLACE and not shared.intersection(node.input[1:])
