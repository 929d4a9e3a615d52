"""The entry point of ``torch.compile(backend="compiled_attn_ort")``, with late imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["compiled_attn_ort"]


def compiled_attn_ort(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
    """Compile a Dynamo graph with ONNX Runtime (extra ``ort``).

    Raises:
        ImportError: another package named `graphs` shadows ours.
        NoOnnx: an operator, dtype or device that ONNX Runtime on the CPU does not have.
    """
    from compiled_attn.shadow import refuse_foreign_graphs

    refuse_foreign_graphs()
    from graphs.backends.onnx.onnxrt import compiled_attn_ort as compile_graph

    return compile_graph(graph, example_inputs)
