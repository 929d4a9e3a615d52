"""A callable with fixed settings, captured in buckets: prepared by eager runs, then dispatched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from graphs.bucketed.axes import InputAxes
from graphs.bucketed.plan import Plans, Rules
from graphs.bucketed.trial import BucketedOptions, Trial
from graphs.capture.inputs import InputSpec
from graphs.capture.structure import CallStructure, FlatCall, Structure
from graphs.errors import BucketedError, InputMismatch

__all__ = ["Bound", "Variant"]


class Bound(nn.Module):
    """A function with some keyword inputs fixed."""

    wrapper_of = "function"

    def __init__(self, function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.training = getattr(function, "training", False)
        self._settings = dict(settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns."""
        return self.function(*args, **kwargs, **self._settings)


class _FlatOutputs(nn.Module):
    """Calls a function of flat inputs, and returns the tensors of its outputs, flat."""

    wrapper_of = "call"

    def __init__(
        self, call: FlatCall, outputs: Structure, tensors: Sequence[int], constants: Sequence[Any]
    ) -> None:
        super().__init__()
        self.call = call
        self.training = call.training
        self.flat_input_names = call.flat_input_names
        self._outputs = outputs
        self._leaves_of = outputs.leaves_of
        self._tensors = (*tensors,)
        self._constants = [
            (index, value) for index, value in enumerate(constants) if index not in tensors
        ]

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return the tensors of what the function returns."""
        value = self.call(*inputs)
        leaves = self._leaves_of(value) if torch.compiler.is_compiling() else self._checked(value)
        return tuple(leaves[index] for index in self._tensors)

    def _checked(self, value: Any) -> Sequence[Any]:
        # A backend that runs Python would drop what changes with the values of the inputs.
        leaves = self._outputs.take(value)
        if leaves is None:
            raise BucketedError("the outputs have another structure than at the warmup")
        for index, known in self._constants:
            if leaves[index] is not known and leaves[index] != known:
                raise BucketedError(
                    f"output '{self._outputs.names[index]}' is {leaves[index]!r}, at the warmup "
                    f"{known!r}: return what changes as a tensor"
                )
        return leaves


class Variant(Trial):
    """One structure of inputs and outputs, and how both follow the axes.

    Args:
        function: the user's callable.
        call: the same with its settings fixed; takes the example.
        args, kwargs: the example.
        options: of the user.
        lock: held while a call fills buffers and runs.

    Attributes:
        module: the callable with flat inputs and outputs, to capture.
        plans: of the calls so far.

    Raises:
        BucketedError: axes, outputs or padding do not fit.
        TypeError: an input is of an unknown class.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: BucketedOptions,
        lock: AbstractContextManager[object],
    ) -> None:
        self._structure = structure = CallStructure(function, args, kwargs)
        flat = FlatCall(call, structure.names, structure.build)
        example, structure.leaves = structure.leaves, []
        for name, each in zip(structure.names, example, strict=True):
            if isinstance(each, Tensor) and each.layout is not torch.strided:
                raise BucketedError(f"input '{name}' is {each.layout}; expected a strided tensor")
        names = options.buckets.names
        if options.axes is None:
            axes = InputAxes.guessed(names, structure.names, example)
        else:
            axes = InputAxes.annotated(names, structure.names, example, options.axes)
        super().__init__(function, flat, axes, example, options)
        self._specs = [
            InputSpec.of(name, each) for name, each in zip(structure.names, example, strict=True)
        ]
        self.module = _FlatOutputs(self._call, self._outputs, self._tensors, self._constants)
        self.plans = Plans(
            Rules(
                options.name,
                self.module,
                self._dims,
                self._pads,
                self._written,
                self._state,
                self._follows,
                self._outputs.names,
                self._shapes,
                self._tensors,
                self._constants,
                self._aliases,
            ),
            lock,
        )

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the flat inputs of a call.

        Raises:
            InputMismatch: the call has another structure than the example.
        """
        return self._structure.flatten(args, kwargs, self._options.name)

    @property
    def output_names(self) -> Sequence[str]:
        """Names of the flat outputs."""
        return self._outputs.names

    @property
    def build(self) -> Callable[[Sequence[Any]], Any]:
        """Takes flat outputs, returns them as the callable does."""
        return self._outputs.build

    def run_eagerly(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Run the callable itself on flat inputs; returns flat outputs."""
        found = self._outputs.take(self._call(*leaves))
        if found is None:
            raise BucketedError(
                f"{self._options.name}: the outputs have another structure than at the warmup"
            )
        return found

    def sizes(self, leaves: Sequence[Any]) -> dict[str, int]:
        """Check flat inputs against the example, and return the size of each axis.

        Raises:
            InputMismatch: an input has another dtype, device, number of dimensions or constant, a
                size that follows no axis differs, or two inputs disagree about an axis.
        """
        sizes = self.axes.sizes(leaves, self._options.name)
        for index, (spec, value) in enumerate(zip(self._specs, leaves, strict=True)):
            dims = self._dims.get(index, {})
            if spec.shape is not None and isinstance(value, Tensor):
                if value.layout is not torch.strided:
                    raise InputMismatch(
                        self._options.name,
                        f"tensor '{spec.name}' is {value.layout}, captured a strided tensor",
                    )
                shape = tuple(
                    sizes[dims[dim]] if dim in dims else size for dim, size in enumerate(spec.shape)
                )
                spec = InputSpec(spec.name, shape, spec.dtype, spec.device, value.stride())
            if difference := spec.mismatch(value):
                raise InputMismatch(self._options.name, difference)
        return sizes
