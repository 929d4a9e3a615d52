"""Packed layers of one input in one call: a pass over inductor's graphs.

Queries, keys and values are layers of one input, so are gate and up. The op ``packed_linears``
takes them at once, so that memory reads on from one weight to the next, and a layer of the model
has 4 calls instead of 7. Each weight stays the parameter that it was; results are the same bits,
but for a gate, which is no longer a kernel of inductor's (`compiled_attn.ops.gated`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node, map_arg

from compiled_attn.ops import gated

__all__ = ["JoinedLayers"]


class JoinedLayers(CustomGraphPass):
    """Replaces calls of ``packed_linear`` of one input by one of ``packed_linears``, or of a gate
    and what it is for by one of ``packed_gated``.

    Only where weights, biases and scales are inputs of the graph, weights of one dtype, and all of
    the calls have a bias or none, and a scale or none.
    """

    def __call__(self, graph: Graph) -> None:
        """Rewrites the graph in place."""
        groups = defaultdict(list)
        for node in graph.nodes:
            if node.target is torch.ops.compiled_attn.packed_linear.default:
                input, *parameters = _arguments(node)
                if all(each is None or each.op == "placeholder" for each in parameters):
                    has = tuple(each is None for each in parameters)
                    dtype = getattr(parameters[0].meta.get("val"), "dtype", None)
                    groups[_identity(input), dtype, has].append(node)
        for nodes in groups.values():
            if len(nodes) > 1:
                gated.gate(graph, _join(graph, nodes))

    def uuid(self) -> Any:
        """Identity of the pass in inductor's cache: its source."""
        return get_hash_for_files((__file__, gated.__file__))


def _arguments(node: Node) -> list[Any]:
    """Input, weight, bias and scale of a call of ``packed_linear``."""
    given = dict(zip(("input", "weight", "bias", "scale"), node.args, strict=False)) | node.kwargs
    return [given[name] for name in ("input", "weight")] + [given.get("bias"), given.get("scale")]


def _identity(node: Any) -> Any:
    """The same for what is the same tensor in the same shape: each layer flattens its input."""
    if isinstance(node, Node) and node.target in gated.SHAPES:
        shaped, shape = node.args[0], cast(Sequence[Any], node.args[1])
        return node.target, _identity(shaped), tuple(shape)
    return node


def _join(graph: Graph, nodes: list[Node]) -> Node:
    """One call at the place of the first of ``nodes``, which are of one input, instead of all."""
    first, *_ = nodes
    input = _arguments(first)[0]
    parameters = zip(*(_arguments(node)[1:] for node in nodes), strict=True)
    lists = [[each for each in kind if each is not None] for kind in parameters]
    given = input, *lists
    with graph.inserting_before(first):
        joined = graph.call_function(torch.ops.compiled_attn.packed_linears.default, given)
        joined.meta["val"] = [node.meta["val"] for node in nodes]
        # Or else inductor may lay out the input as it likes, also by columns.
        joined.meta["eager_input_vals"] = map_arg(given, lambda node: node.meta["val"]), {}
        for place, node in enumerate(nodes):
            out = graph.call_function(getitem, (joined, place))
            out.meta.update(node.meta)
            out.meta.pop("eager_input_vals", None)  # they are those of the call
            node.replace_all_uses_with(out)
    for node in nodes:
        graph.erase_node(node)
    return joined
