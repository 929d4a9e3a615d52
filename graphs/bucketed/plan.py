"""Plans: how inputs of one layout run: as they are, or padded into a bucket and its outputs cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphs.bucketed.outputs import Cut
from graphs.bucketed.padding import Pad, PadTail, tails_of
from graphs.buckets.space import Bucket
from graphs.capture.capture import CapturedGraph
from graphs.capture.inputs import InputsCheck, InputSpec, has_memory, overlaps
from graphs.errors import BucketedError, CaptureError, InputMismatch
from graphs.torch_internals.foreach import copy_all

__all__ = ["Plan", "Plans", "Rules"]

_MOST_PLANS = 4096


@dataclass(frozen=True)
class Rules:
    """What eager runs have found out about a callable of flat inputs and outputs.

    Attributes:
        name: for errors.
        module: takes flat inputs, returns the tensors of its outputs.
        dims: by input, the axis of each dimension that follows one.
        pads: by input, its padding.
        written: inputs that it writes to.
        state: parameters and buffers that it writes to, with their names.
        cuts: dimensions of outputs to cut.
        names: of the outputs.
        shapes: of the outputs that are tensors, at the least sizes; None: of any size.
        tensors: which outputs are tensors.
        constants: the others; None for a tensor.
        aliases: outputs that share memory with an input.
    """

    name: str
    module: nn.Module
    dims: Mapping[int, Mapping[int, str]]
    pads: Mapping[int, Pad]
    written: Sequence[int]
    state: Sequence[tuple[str, Tensor]]
    cuts: Sequence[Cut]
    names: Sequence[str]
    shapes: Sequence[Sequence[int | None]]
    tensors: Sequence[int]
    constants: Sequence[Any]
    aliases: Sequence[int]


class Plans:
    """The plans of a callable, by the layout of the inputs, and the buffers that they share.

    Args:
        rules: of the callable.
        lock: held while a call fills buffers and runs; a thread may take it twice.

    Attributes:
        last: the plan that filled the buffers last; None while a call fills them.
        is_running: whether a call has the buffers.
        generation: counts how often plans were cleared.
    """

    def __init__(self, rules: Rules, lock: AbstractContextManager[object]) -> None:
        self.rules = rules
        self.lock = lock
        self.last: Plan | None = None
        self.is_running = False
        self.generation = 0
        self._plans: dict[Any, Plan] = {}
        self._buffers: dict[int, Tensor] = {}

    def find(self, leaves: Sequence[Any]) -> tuple[Plan | None, Sequence[Any]]:
        """Return the plan for inputs of these layouts or None, and the inputs, each distinct."""
        last = self.last
        if last is not None and last.fits(*leaves):  # not one tensor passed twice
            return last, leaves
        leaves = _distinct(leaves)
        plan = self._plans.get(_layout(leaves))
        fits = plan is not None and plan.check.mismatch(leaves) is None
        return plan if fits else None, leaves

    def add(
        self,
        leaves: Sequence[Any],
        sizes: Mapping[str, int],
        bucket: Bucket,
        graph: CapturedGraph,
        generation: int,
    ) -> Plan:
        """Make and remember the plan of inputs of some sizes, which go to a bucket.

        Args:
            generation: before the bucket was chosen; the plan is not remembered if plans were
                cleared since, as its graph may be closed.

        Raises:
            InputMismatch: an input that is written in place has other strides than its example.
        """
        with self.lock:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            runs_at: Mapping[str, int] = bucket
            if any(bucket[axis] != size for axis, size in sizes.items()):
                inputs = self._placeholders(leaves, graph)
                if (unpadded := graph.at_sizes_of(self.rules.module, inputs)) is not None:
                    graph, runs_at = unpadded, sizes
            plan = Plan(self, leaves, sizes, bucket, graph, runs_at, generation)
            if generation == self.generation:
                self._plans[_layout(leaves)] = plan
            return plan

    def _placeholders(self, leaves: Sequence[Any], graph: CapturedGraph) -> list[Any]:
        """Inputs as the graph gets them: leaves, or empty tensors where those will be copied."""
        found = [*leaves]
        for index, spec in enumerate(graph.input_specs):
            value, strides = leaves[index], spec.stride
            if not isinstance(value, Tensor) or strides is None:
                continue
            if self.rules.dims.get(index):
                strides = torch.empty(value.shape, device="meta").stride()
            if value.is_inference() or value.stride() != strides:
                like: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
                found[index] = torch.empty_strided(value.shape, strides, **like)
        return found

    def clear(self) -> None:
        """Release buffers and graphs."""
        with self.lock:
            self._plans.clear()
            self._buffers.clear()
            self.last = None
            self.generation += 1

    def buffer(self, index: int, like: Tensor, spec: InputSpec) -> Tensor:
        """A buffer for an input, in memory that all buckets share."""
        assert spec.shape is not None and spec.stride is not None
        steps = [(size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True)]
        count = 1 + sum(steps) if all(spec.shape) else 0
        memory = self._buffers.get(index)
        if memory is None or memory.numel() < count:
            with torch.inference_mode(False):
                memory = torch.empty(count, dtype=like.dtype, device=like.device)
            self._buffers[index] = memory
        return memory.as_strided(spec.shape, spec.stride)


class Plan:
    """How inputs of one layout run.

    Args:
        plans: those of the callable.
        leaves: flat inputs.
        sizes: of their axes.
        bucket: the one that holds them.
        graph: of the bucket, or of just these sizes.
        runs_at: sizes of the graph.

    Raises:
        InputMismatch: an input that is written in place has other strides than its example.
    """

    def __init__(
        self,
        plans: Plans,
        leaves: Sequence[Any],
        sizes: Mapping[str, int],
        bucket: Bucket,
        graph: CapturedGraph,
        runs_at: Mapping[str, int],
        generation: int,
    ) -> None:
        rules = plans.rules
        self.bucket = bucket
        self.sizes = tuple(sizes[axis] for axis in bucket.names)
        self._plans, self._rules = plans, rules
        self._graph, self._runs_at, self._generation = graph, runs_at, generation
        self._has_run = False
        self.check = InputsCheck(rules.module, leaves)
        self.fits = self.check.fits
        self._inputs: list[Any] = [*leaves]
        self._direct: list[int] = []
        self._copied: list[int] = []
        self._targets: list[Tensor] = []
        self._constant_tails: list[PadTail] = []
        self._repeated_tails: list[PadTail] = []
        statics = iter(graph.static_inputs)
        for index, value in enumerate(leaves):
            if isinstance(value, Tensor):
                self._add(index, value, next(statics, None))
        self._inputs = [
            None if index in self._direct else each for index, each in enumerate(self._inputs)
        ]
        self._is_direct = len(self._direct) == len(leaves)
        self._cuts = [
            (rules.tensors.index(cut.output), cut.dim, size)
            for cut in rules.cuts
            if (size := cut.size_at(sizes)) != cut.size_at(runs_at)
        ]
        self._copies = {rules.tensors.index(index) for index in rules.aliases}
        self._writes = bool(self._copied and (rules.written or rules.state))

    def _add(self, index: int, value: Tensor, static: Tensor | None) -> None:
        rules, spec = self._rules, self._graph.input_specs[index]
        dims = rules.dims.get(index, {})
        fits = tuple(value.shape) == spec.shape and value.stride() == spec.stride
        if fits and not value.is_inference():
            self._direct.append(index)
            return
        if index in rules.written:
            raise InputMismatch(
                rules.name,
                f"'{spec.name}' is written in place and is an inference tensor: clone() it outside "
                "of inference mode"
                if value.is_inference()
                else f"'{spec.name}' is written in place and has strides {value.stride()}, "
                f"captured {spec.stride}: pass it with these",
            )
        buffer = self._plans.buffer(index, value, spec) if static is None else static
        sizes = {dim: value.shape[dim] for dim in dims}
        real, tails = tails_of(buffer, sizes, rules.pads.get(index, 0))
        self._copied.append(index)
        self._targets.append(real)
        self._inputs[index] = buffer
        for tail in tails:
            (self._constant_tails if tail.is_constant else self._repeated_tails).append(tail)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Pad, run the graph, cut; returns flat outputs."""
        plans, rules = self._plans, self._rules
        inputs = leaves
        if not self._is_direct:
            inputs = self._inputs.copy()
            for index in self._direct:
                inputs[index] = leaves[index]
        if self._writes:
            self._refuse_overlaps(leaves)
        with plans.lock:
            if plans.is_running:
                raise CaptureError(rules.name, "is called by its own run; wrap only the outer call")
            plans.is_running = True
            # A call that fails while it writes must not leave its values as padding.
            last, plans.last = plans.last, None
            try:
                if self._targets:
                    if last is not self:
                        for tail in self._constant_tails:
                            tail.fill()
                    copy_all(self._targets, [leaves[index] for index in self._copied])
                    for tail in self._repeated_tails:
                        tail.fill()
                outputs = self._graph.run(*inputs)
                if not self._has_run:
                    self._check_outputs(inputs, outputs)
                if self._cuts or self._copies:
                    outputs = [*outputs]
                    for index, dim, size in self._cuts:
                        outputs[index] = outputs[index].narrow(dim, 0, size)
                    for index in self._copies:  # before another call fills the buffers
                        outputs[index] = outputs[index].clone()
                if self._generation == plans.generation:
                    plans.last = self
            finally:
                plans.is_running = False
        constants = rules.constants
        if len(constants) > len(outputs):
            tensors = iter(outputs)
            outputs = [
                next(tensors) if index in rules.tensors else constant
                for index, constant in enumerate(constants)
            ]
        return outputs

    def _check_outputs(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check the shapes of outputs at these sizes, and find those that are views of inputs."""
        rules = self._rules
        storages = {each.untyped_storage().data_ptr() for each in inputs if has_memory(each)}
        expected = [[*shape] for shape in rules.shapes]
        for cut in rules.cuts:
            expected[rules.tensors.index(cut.output)][cut.dim] = cut.size_at(self._runs_at)
        for index, dim, size in self._cuts:
            if size < 0 or size > outputs[index].shape[dim]:
                expected[index][dim] = size
        for index, (output, shape) in enumerate(zip(outputs, expected, strict=True)):
            got = [*output.shape]
            if len(got) != len(shape) or any(
                size not in (None, found) for size, found in zip(shape, got, strict=True)
            ):
                name = rules.names[rules.tensors[index]]
                raise BucketedError(
                    f"{rules.name}[{self.bucket}]: output '{name}' has shape {tuple(got)}, "
                    f"expected {tuple(shape)} by how it follows the axes at smaller sizes: say "
                    f"how, outputs={{{name!r}: ...}}"
                )
            if has_memory(output) and output.untyped_storage().data_ptr() in storages:
                self._copies.add(index)
        self._has_run = True

    def _refuse_overlaps(self, leaves: Sequence[Any]) -> None:
        # The graph reads the copy, which does not see what it writes.
        names = [spec.name for spec in self._graph.input_specs]
        written = [(names[index], leaves[index]) for index in self._rules.written]
        for index in self._copied:
            for name, other in (*written, *self._rules.state):
                if overlaps(leaves[index], other):
                    raise InputMismatch(
                        self._rules.name,
                        f"'{names[index]}' overlaps '{name}' in memory, which is written in place: "
                        "clone() it",
                    )


def _distinct(leaves: Sequence[Any]) -> Sequence[Any]:
    # A graph is of distinct tensors; one that writes refuses those that share memory.
    if len({*map(id, leaves)}) == len(leaves):
        return leaves
    distinct = [*leaves]
    seen: set[int] = set()
    for index, each in enumerate(leaves):
        if isinstance(each, Tensor) and id(each) in seen:
            distinct[index] = each.detach()
        seen.add(id(each))
    return distinct


def _layout(leaves: Sequence[Any]) -> Any:
    return tuple(
        (each.shape, each.stride(), each.is_inference())
        for each in leaves
        if isinstance(each, Tensor)
    )
