"""Float32 linear layers through oneDNN inside an inductor graph.

On x86 torch sends a float32 matmul to MKL, which uses half of the vector width on processors not
made by Intel. oneDNN is in the same wheel and uses all of it: `benchmarks/linear.py` prints the
ratio. Inductor does this only for weights that are frozen into each graph; here the weight stays
the module's parameter.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

__all__ = ["for_cpu", "takes_onednn"]

_aten = torch.ops.aten
_MIN_ROWS = 16  # below, oneDNN's call costs more than it saves

_library = torch.library.Library("graphs", "DEF")
_library.define("onednn_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")


def for_cpu(sizes: Collection[tuple[int, int]] | None = None) -> dict[str, Any]:
    """Options of `torch.compile` with this pass, or none where it does not help.

    Args:
        sizes: (outputs, inputs) of the layers that oneDNN computes faster here; None: all.
    """
    usable = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    helps = sizes is None or len(sizes) > 0
    return {"post_grad_custom_post_pass": OneDnnLinear(sizes)} if usable and helps else {}


class OneDnnLinear(CustomGraphPass):
    """Replaces ``mm(x, weight.T)`` and ``addmm(bias, x, weight.T)`` in float32 on the CPU.

    Only where the weight is a contiguous input of the graph and there are at least 16 rows, which a
    graph with symbolic rows checks at run time. The result differs only in rounding.

    Args:
        sizes: (outputs, inputs) of the weights; None: of any size.
    """

    def __init__(self, sizes: Collection[tuple[int, int]] | None = None) -> None:
        self._sizes = None if sizes is None else sorted(sizes)

    def __call__(self, graph: Graph) -> None:
        """Rewrites the graph in place."""
        for node in list(graph.nodes):
            matched = _linear_arguments(node)
            if matched is None:
                continue
            if self._sizes is not None and tuple(matched[1].meta["val"].shape) not in self._sizes:
                continue
            with graph.inserting_before(node):
                linear = graph.call_function(torch.ops.graphs.onednn_linear.default, matched)
            linear.meta.update(node.meta)
            node.replace_all_uses_with(linear)
            graph.erase_node(node)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Identity of the pass in inductor's cache: its source and the sizes."""
        return get_hash_for_files((__file__,), str(self._sizes))


def _linear_arguments(node: Node) -> tuple[Node, Node, Node | None] | None:
    """Input, weight and bias if the node is a float32 linear layer of a parameter, else None."""
    if node.target is _aten.mm.default:
        bias, (rows, transposed) = None, node.args
    elif node.target is _aten.addmm.default and not node.kwargs:
        bias, rows, transposed = node.args
    else:
        return None
    weight = _transposed_parameter(transposed)
    if weight is None or not isinstance(rows, Node):
        return None
    value = rows.meta["val"]
    if value.dtype is not torch.float32 or value.device.type != "cpu":
        return None
    if isinstance(value.shape[0], int) and value.shape[0] < _MIN_ROWS:
        return None
    if isinstance(bias, Node) and bias.meta["val"].dim() != 1:
        return None
    return rows, weight, bias if isinstance(bias, Node) else None


def _transposed_parameter(node: Any) -> Node | None:
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    is_transpose = (
        node.target is _aten.t.default
        or (node.target is _aten.permute.default and node.args[1] == [1, 0])
    )  # fmt: skip
    weight = node.args[0]
    if not is_transpose or not isinstance(weight, Node) or weight.op != "placeholder":
        return None
    return weight if weight.meta["val"].is_contiguous() else None


def takes_onednn(input: Tensor) -> bool:
    """Whether ``graphs::onednn_linear`` computes this input by oneDNN."""
    return input.shape[0] >= _MIN_ROWS


def _onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not takes_onednn(input):
        return torch.nn.functional.linear(input, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(
        input.contiguous(), weight, bias, "none", [], ""
    )
    return out


def _onednn_linear_shape(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])


_library.impl("onednn_linear", _onednn_linear, "CPU")
torch.library.register_fake("graphs::onednn_linear", _onednn_linear_shape, lib=_library)
