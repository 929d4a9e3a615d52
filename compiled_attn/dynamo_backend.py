"""Entry points of Dynamo backends, ``torch.compile(backend="bucketed")``, with late imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["bucketed", "compiled_attn_ort"]


def bucketed(
    graph: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Any:
    """Run a Dynamo graph of symbolic sizes in buckets, see :func:`graphs.bucketed`.

    Raises:
        ImportError: another package named `graphs` shadows ours.
        BucketedError: the options have no range for an axis.
    """
    from compiled_attn.shadow import refuse_foreign_graphs

    refuse_foreign_graphs()
    from graphs.bucketed.dynamo import bucketed_backend

    return bucketed_backend(graph, example_inputs, options)


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
