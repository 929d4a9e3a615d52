"""A session of ONNX Runtime on the memory of torch tensors."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphs.backends.onnx.export import OnnxGraph
from graphs.errors import NoOnnx

__all__ = ["OnnxSession", "may_alias"]

_log = logging.getLogger(__name__)

# Ops that copy their first input, unless it is the output already, and then write elements.
_IN_PLACE = frozenset(("ScatterND", "ScatterElements"))
# Ops whose output may share the memory of their first input.
_MAY_SHARE = frozenset(
    ("Cast", "Dropout", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
)


class OnnxSession:
    """An ONNX Runtime session whose inputs and results are the memory of torch tensors.

    Args:
        graph: the model.

    Attributes:
        in_place: indices of the inputs that the model updates in place.
        copied_back: indices of those whose new value is copied back, since the old value may be
            read after the write.

    Raises:
        NoOnnx: ONNX Runtime cannot run the model, such as one of bfloat16 products on a CPU.
    """

    def __init__(self, graph: OnnxGraph) -> None:
        self._graph = graph
        self._session, running = _load(graph.model)
        aliased = {
            index: may_alias(running, graph.inputs[index], graph.outputs[result])
            for index, result in graph.mutated
        }
        self.in_place = tuple(index for index, is_safe in aliased.items() if is_safe)
        self.copied_back = tuple(index for index, is_safe in aliased.items() if not is_safe)
        if self.copied_back:
            _log.info("copied back at each run: inputs %s", self.copied_back)
        self._binding = self._session.io_binding()
        self._types = {
            value.name: value.type.tensor_type.elem_type
            for value in (*graph.model.graph.input, *graph.model.graph.output)
        }
        self._bound: dict[str, int] = {}

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Run on inputs of the captured shapes, and update those that the graph updates.

        Raises:
            RuntimeError: an assertion of the graph fails. Unlike in other backends, the writes are
                done.
        """
        graph = self._graph
        given = [value.detach().contiguous() for value in inputs]
        results = [torch.empty(like.shape, dtype=like.dtype) for like in graph.examples]
        for index, result in graph.mutated:
            if index in self.in_place:
                results[result] = given[index]
        for name, value in zip(graph.inputs, given, strict=True):
            self._bind(self._binding.bind_input, name, value)
        for name, value in zip(graph.outputs, results, strict=True):
            self._bind(self._binding.bind_output, name, value)
        self._session.run_with_iobinding(self._binding)
        for index, result in graph.mutated:
            if results[result].data_ptr() != inputs[index].data_ptr():
                inputs[index].copy_(results[result])
        self._check_assertions(results)
        return self._returned(inputs, results)

    def _bind(self, bind: Any, name: str, value: Tensor) -> None:
        address = value.data_ptr()
        if self._bound.get(name) != address:
            bind(name, "cpu", 0, self._types[name], tuple(value.shape), address)
            self._bound[name] = address

    def _check_assertions(self, results: list[Tensor]) -> None:
        for result, message in self._graph.asserted:
            if not results[result]:
                raise RuntimeError(f"{message} (found after the graph ran: its writes are done)")

    def _returned(self, inputs: Sequence[Tensor], results: list[Tensor]) -> list[Tensor | None]:
        updates = {result for _, result in self._graph.mutated}
        returned: list[Tensor | None] = []
        for index in self._graph.returned:
            if index is None:
                returned.append(None)
            elif index < 0:
                returned.append(inputs[~index])
            else:  # the new value of an input may be the input itself: return a copy
                value, like = results[index], self._graph.examples[index]
                if not like.is_contiguous():  # as all that ONNX Runtime writes
                    value = torch.empty_strided(like.shape, like.stride()).copy_(value)
                elif index in updates:
                    value = value.clone()
                returned.append(value)
        return returned


def _load(model: Any) -> tuple[Any, Any]:
    # The session, and the graph that it runs after its optimisations.
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    # Each session has its own threads, which must not spin while other sessions run.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with tempfile.TemporaryDirectory(prefix="graphs-onnx-") as folder:
        path = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(path)
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            text = str(error).strip().splitlines()
            raise NoOnnx(f"ONNX Runtime refuses it: {text[0] if text else error!r}") from error
        return session, onnx.load(str(path), load_external_data=False).graph


def may_alias(graph: Any, input_name: str, output_name: str) -> bool:
    """Whether `output_name` may be bound to the memory of `input_name`.

    ONNX has no in-place writes: a cache goes in as an input and comes out as a result. Binding both
    to one address saves a copy of the whole cache, as `ScatterND` then writes only the new rows. It
    is correct only if nothing reads the old cache after that write. ONNX Runtime orders nodes only
    by data, so a reader is sure to run first only if the write depends on it.

    Args:
        graph: the `onnx.GraphProto` after ONNX Runtime's optimisations.

    Returns:
        True if every node that reads the input, or anything that may share its memory, feeds the
        node that makes the output, and that node writes in place. False in case of doubt.
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
    node = nodes[final]
    writes_in_place = node.op_type in _IN_PLACE and not shared.intersection(node.input[1:])
    return final not in readers or writes_in_place


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
