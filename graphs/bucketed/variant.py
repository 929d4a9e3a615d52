"""A callable with fixed settings, captured in buckets: prepared by eager runs, then dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphs.bucketed.axes import InputAxes
from graphs.bucketed.independence import check_equal, cut_outputs, mixing_module
from graphs.bucketed.outputs import Run, find_cuts
from graphs.bucketed.padding import Pad, padded_copy, pads_of
from graphs.bucketed.plan import Plans, Rules
from graphs.buckets.space import BucketSpace
from graphs.capture.inputs import InputSpec
from graphs.capture.structure import CallStructure, FlatCall, Structure
from graphs.errors import BucketedError, InputMismatch

__all__ = ["BucketedOptions", "Variant"]


@dataclass(frozen=True)
class BucketedOptions:
    """What a user says about a callable; see :func:`graphs.bucketed`."""

    name: str
    buckets: BucketSpace
    axes: Mapping[str, Any] | None = None
    pad: Mapping[str, Pad] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    check: bool = True


class _FlatOutputs(nn.Module):
    """Calls a function of flat inputs, and returns the tensors of its outputs, flat."""

    def __init__(self, call: FlatCall, outputs: Structure, tensors: Sequence[int]) -> None:
        super().__init__()
        self.call = call
        self.training = call.training
        self.flat_input_names = call.flat_input_names
        self._leaves_of = outputs.leaves_of
        self._tensors = (*tensors,)

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return the tensors of what the function returns."""
        leaves = self._leaves_of(self.call(*inputs))
        return tuple(leaves[index] for index in self._tensors)


class Variant:
    """One structure of inputs and outputs, and how both follow the axes.

    The callable runs eagerly on copies of the example: at two sizes of each axis, and once padded.

    Args:
        function: the user's callable.
        call: the same with its settings fixed; takes the example.
        args, kwargs: the example.
        options: of the user.

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
    ) -> None:
        self._options = options
        self._function = function
        self._structure = structure = CallStructure(function, args, kwargs)
        self._call = FlatCall(call, structure.names, structure.build)
        example, structure.leaves = structure.leaves, []
        names = options.buckets.names
        if options.axes is None:
            self.axes = InputAxes.guessed(names, structure.names, example)
        else:
            self.axes = InputAxes.annotated(names, structure.names, example, options.axes)
        self._pads = pads_of(self.axes, example, options.pad)
        self._dims = {index: self.axes.of_input(index) for index in self._pads}
        self._example = [each.detach() if isinstance(each, Tensor) else each for each in example]
        self._specs = [
            InputSpec.of(name, each) for name, each in zip(structure.names, example, strict=True)
        ]
        self._try_eagerly(self._call)
        self.module = _FlatOutputs(self._call, self._outputs, self._tensors)
        self.plans = Plans(
            Rules(
                options.name,
                self.module,
                self._dims,
                self._pads,
                self._written,
                [cut for cut in self._follows if cut.axis not in options.exact],
                self._tensors,
                self._constants,
                self._aliases,
            )
        )

    def inputs_at(self, sizes: Mapping[str, int]) -> list[Any]:
        """Make flat inputs of other sizes, from the example."""
        return self.axes.resized(self._example, sizes)

    def _try_eagerly(self, call: FlatCall) -> None:
        tried = self._sizes_to_try()
        low = {axis: sizes[0] for axis, sizes in tried.items()}
        base_inputs = self.inputs_at(low)
        versions = [_version(each) for each in base_inputs]
        base = self._eager(call, low, base_inputs)
        self._written = [
            index for index, each in enumerate(base_inputs) if _version(each) != versions[index]
        ]
        self._outputs = self._structure_of(base)
        leaves, self._outputs.leaves = self._outputs.leaves, []
        self._tensors = [i for i, each in enumerate(leaves) if isinstance(each, Tensor)]
        self._constants = [None if isinstance(each, Tensor) else each for each in leaves]
        storages = {_storage(each) for each in base_inputs if isinstance(each, Tensor)}
        self._aliases = [
            i
            for i, each in enumerate(leaves)
            if isinstance(each, Tensor) and _storage(each) in storages
        ]
        runs = [Run(low, leaves)]
        for axis, more in tried.items():
            for size in more[1:]:
                sizes = {**low, axis: size}
                result = self._outputs.take(self._eager(call, sizes, self.inputs_at(sizes)))
                if result is None:
                    raise BucketedError(
                        f"the outputs have another structure at {_shown(sizes)} than at "
                        f"{_shown(low)}: return the same containers at all sizes"
                    )
                runs.append(Run(sizes, result))
        self._follows = find_cuts(self._outputs.names, runs, self._options.outputs)
        bucket = {axis: sizes[min(1, len(sizes) - 1)] for axis, sizes in tried.items()}
        self._check_padding(call, low, bucket, leaves)

    def _sizes_to_try(self) -> dict[str, list[int]]:
        """The three least buckets of each axis; a bucket and half of it if it is the only one."""
        found = {}
        for axis in self.axes.names:
            sizes = sorted({bucket[axis] for bucket in self._options.buckets})[:3]
            if len(sizes) == 1 and axis not in self._options.exact:
                sizes = sorted({max(1, sizes[0] // 2), *sizes})
            found[axis] = sizes
        return found

    def _eager(self, call: FlatCall, sizes: Mapping[str, int], inputs: Sequence[Any]) -> Any:
        try:
            with torch.no_grad():
                return call(*inputs)
        except Exception as error:
            follows = ", ".join(
                f"{self.axes.inputs[index]}[{dim}]={axis}"
                for index, dims in self._dims.items()
                for dim, axis in dims.items()
            )
            line = next(iter(str(error).strip().splitlines()), "")
            raise BucketedError(
                f"it fails at {_shown(sizes)}: {type(error).__name__}: {line}; dimensions that "
                f"follow an axis: {follows}: correct axes= or the sizes"
            ) from error

    def _structure_of(self, outputs: Any) -> Structure:
        try:
            return Structure(outputs, "output")
        except TypeError as error:
            raise BucketedError(
                f"{error}; or switch that output off, such as use_cache=False"
            ) from None

    def _check_padding(
        self,
        call: FlatCall,
        low: Mapping[str, int],
        bucket: Mapping[str, int],
        expected: Sequence[Any],
    ) -> None:
        exact = self._options.exact
        lost = [index for index in self._written if {*self._dims.get(index, {}).values()} - exact]
        if lost:
            raise BucketedError(
                f"input '{self.axes.inputs[lost[0]]}' is written in place, and its padded copy "
                "would be written instead: return the result, or keep it as a buffer"
            )
        bucket = {axis: low[axis] if axis in exact else size for axis, size in bucket.items()}
        if not self._options.check or bucket == low:
            return
        cuts = [cut for cut in self._follows if cut.axis not in exact]
        padded = self._padded(self.inputs_at(low), bucket)
        outputs = self._outputs.take(self._eager(call, bucket, padded))
        assert outputs is not None  # the structure at these sizes was compared

        def why() -> str:
            with torch.no_grad():
                return mixing_module(
                    self._function,
                    lambda: call(*self.inputs_at(low)),
                    lambda: call(*self._padded(self.inputs_at(low), bucket)),
                )

        check_equal(self._outputs.names, cut_outputs(outputs, cuts, low), expected, why)

    def _padded(self, inputs: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
        padded = [*inputs]
        for index, dims in self._dims.items():
            at = {dim: sizes[axis] for dim, axis in dims.items()}
            padded[index] = padded_copy(inputs[index], at, self._pads[index])
        return padded

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
        return self._outputs.leaves_of(self._call(*leaves))

    def check_split(self, axis: str) -> None:
        """Check that all outputs follow an axis, so that results of parts can be joined.

        Raises:
            BucketedError: an output does not.
        """
        along = {cut.output for cut in self._follows if cut.axis == axis}
        if rest := [index for index in self._tensors if index not in along]:
            raise BucketedError(
                f"overflow='split': output '{self._outputs.names[rest[0]]}' does not follow "
                f"'{axis}', so results of parts cannot be joined: choose another overflow"
            )

    def split(self, leaves: Sequence[Any], axis: str, size: int, most: int) -> Iterator[list[Any]]:
        """Cut flat inputs into parts of at most `most` along an axis of `size`."""
        for start in range(0, size, most):
            part = [*leaves]
            for index, dim in self.axes.dims[axis]:
                part[index] = part[index].narrow(dim, start, min(most, size - start))
            yield part

    def join(self, parts: Sequence[Sequence[Any]], axis: str) -> list[Any]:
        """Join flat outputs of parts along an axis."""
        joined = [*parts[0]]
        for cut in self._follows:
            if cut.axis == axis:
                joined[cut.output] = torch.cat([part[cut.output] for part in parts], cut.dim)
        return joined

    def sizes_to_compare(self) -> Iterator[dict[str, int]]:
        """Sizes between buckets, which not every callable takes, if checked; then a bucket."""
        tried = self._sizes_to_try()
        low = {axis: sizes[0] for axis, sizes in tried.items()}
        between = {
            axis: sizes[-2] + 1 if len(sizes) > 1 and axis not in self._options.exact else sizes[0]
            for axis, sizes in tried.items()
        }
        if self._options.check:
            yield between
        yield low

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
                shape = tuple(
                    sizes[dims[dim]] if dim in dims else size for dim, size in enumerate(spec.shape)
                )
                spec = InputSpec(spec.name, shape, spec.dtype, spec.device, value.stride())
            if difference := spec.mismatch(value):
                raise InputMismatch(self._options.name, difference)
        return sizes


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shown(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())
