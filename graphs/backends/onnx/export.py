"""Exports a functional graph of ATen operators to ONNX."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from graphs.errors import NoOnnx
from graphs.torch_internals.exporting import export_module
from graphs.torch_internals.tracing import quiet_logs

__all__ = ["OnnxGraph", "to_onnx"]

_ASSERTS = (torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default)
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)
_NARROW = (torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class OnnxGraph:
    """An ONNX model and the meaning of its results.

    Attributes:
        model: the `onnx.ModelProto`. Weights and caches are inputs, not constants.
        inputs: the model's name of each input of the graph.
        outputs: the model's name of each result.
        examples: a fake tensor like each result.
        mutated: ``(input, result)``: the result is the new value of that input.
        asserted: ``(result, message)``: the result must be true.
        returned: for each value that the graph returns, the index of its result, or of an input if
            negative (``~index``), or None.
    """

    model: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    examples: tuple[Tensor, ...]
    mutated: tuple[tuple[int, int], ...]
    asserted: tuple[tuple[int, str], ...]
    returned: tuple[int | None, ...]


def to_onnx(graph: GraphModule, inputs: Sequence[Any]) -> OnnxGraph:
    """Export a functional graph of AOTAutograd, whose input mutations are final `copy_` nodes.

    Changes what `graph` returns to the results of the model.

    Raises:
        NoOnnx: it has symbolic sizes, random numbers, or an operator that ONNX does not have.
    """
    if not all(isinstance(value, Tensor) for value in inputs):
        raise NoOnnx("the graph has symbolic sizes: compile it with dynamic=False")
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NoOnnx(
                f"{node.target} draws random numbers, and ONNX Runtime not from torch's generator: "
                "make them an input"
            )
    _widen_indices(graph)
    results = _Results(graph)
    results.take_over()
    model = _export(graph, inputs)
    return OnnxGraph(
        model,
        tuple(value.name for value in model.graph.input),
        tuple(value.name for value in model.graph.output),
        tuple(node.meta["val"] for node in results.nodes),
        tuple(results.mutated),
        tuple(results.asserted),
        tuple(results.returned),
    )


class _Results:
    # Collects the results of the model, each value once.
    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.mutated: list[tuple[int, int]] = []
        self.asserted: list[tuple[int, str]] = []
        self.returned: list[int | None] = []
        self._inputs = {n: i for i, n in enumerate(graph.graph.find_nodes(op="placeholder"))}

    def take_over(self) -> None:
        nodes = self.graph.graph
        (output,) = nodes.find_nodes(op="output")
        for node in [*nodes.nodes]:
            if node.target is torch.ops.aten.copy_.default and _arguments(node)[0] in self._inputs:
                self._update(node)
            elif node.target in _ASSERTS:
                self._assert(node)
        returned: Any = output.args[0]
        self.returned = [self._place(value) for value in returned]
        output.args = (tuple(self.nodes),)
        output.meta.pop("val", None)
        nodes.eliminate_dead_code()
        self.graph.recompile()

    def _update(self, node: Node) -> None:
        target, value = _arguments(node)[:2]
        node.replace_all_uses_with(value)
        self.graph.graph.erase_node(node)
        if value in self._inputs:  # in ONNX a result cannot be an input, only a copy of it
            with self.graph.graph.inserting_after(value):
                copy = self.graph.graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta["val"], value = value.meta["val"], copy
        self.mutated.append((self._inputs[target], self._result(value)))

    def _assert(self, node: Node) -> None:
        condition, *text = _arguments(node)
        if condition not in self._inputs:
            message = str(text[0]) if text else "an assertion of the graph does not hold"
            self.asserted.append((self._result(condition), message))
        self.graph.graph.erase_node(node)

    def _place(self, value: Any) -> int | None:
        if value is None:
            return None
        return ~self._inputs[value] if value in self._inputs else self._result(value)

    def _result(self, node: Any) -> int:
        if not isinstance(node, Node) or not isinstance(node.meta.get("val"), Tensor):
            raise NoOnnx(f"the graph returns {node}, which is not a tensor: return tensors only")
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)


def _widen_indices(graph: GraphModule) -> None:
    # ONNX takes 64-bit indices, but the exporter does not convert them.
    for node in [*graph.graph.nodes]:
        if node.target not in _INDEXED:
            continue
        tensor, indices, *others = _arguments(node)
        with graph.graph.inserting_before(node):
            wide = [_widened(graph, index) for index in indices]
        node.args = (tensor, wide, *others)


def _widened(graph: GraphModule, index: Any) -> Any:
    if not isinstance(index, Node) or index.meta["val"].dtype not in _NARROW:
        return index
    wide = graph.graph.call_function(
        torch.ops.aten._to_copy.default, (index,), {"dtype": torch.int64}
    )
    wide.meta["val"] = index.meta["val"].to(torch.int64)
    return wide


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def _export(graph: GraphModule, inputs: Sequence[Any]) -> Any:
    try:
        with _quietly():
            program = export_module(graph, inputs)
            made = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        raise NoOnnx(_first_cause(error)) from error
    if made is None:
        raise NoOnnx("torch.onnx.export gave no model")
    return made.model_proto


def _first_cause(error: BaseException) -> str:
    # The exporter wraps an error several times, each with pages of advice.
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"no ONNX model of it: {type(error).__name__}: {lines[0] if lines else ''}"


@contextmanager
def _quietly() -> Iterator[None]:
    # Each export logs a missing torchvision, deprecations inside torch, and rewrite patterns.
    levels = dict.fromkeys(("torch.onnx", "onnxscript", "onnx_ir"), logging.ERROR)
    with quiet_logs(levels), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
