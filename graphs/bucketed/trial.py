"""Eager runs of a callable: how outputs follow the axes, and whether padding matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphs.bucketed.axes import InputAxes
from graphs.bucketed.independence import check_equal, cut_outputs, differs, mixing_module
from graphs.bucketed.outputs import Run, find_cuts, shapes_of
from graphs.bucketed.padding import Pad, padded_copy, pads_of
from graphs.buckets.space import BucketSpace
from graphs.capture.input_overlaps import watch_writes
from graphs.capture.inputs import tensors_of
from graphs.capture.structure import FlatCall, Structure
from graphs.errors import BucketedError

__all__ = ["BucketedOptions", "Trial"]


@dataclass(frozen=True)
class BucketedOptions:
    """What a user says about a callable; see :func:`graphs.bucketed`.

    `ladder` is the buckets without those that were learned: a callable need not run at their sizes.
    """

    name: str
    buckets: BucketSpace
    ladder: BucketSpace
    axes: Mapping[str, Any] | None = None
    pad: Mapping[str, Pad] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    check: bool = True


class Trial:
    """Runs a callable at up to three sizes of each axis, and through padding.

    Args:
        function: the user's callable.
        call: the same, of flat inputs.
        axes: of the inputs.
        example: flat inputs.
        options: of the user.

    Raises:
        BucketedError: axes, outputs or padding do not fit.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: FlatCall,
        axes: InputAxes,
        example: Sequence[Any],
        options: BucketedOptions,
    ) -> None:
        self.axes, self.exact = axes, options.exact
        self._options, self._function, self._call = options, function, call
        self._pads = pads_of(axes, example, options.pad)
        self._dims = {index: axes.of_input(index) for index in self._pads}
        if empty := [axis for axis, size in axes.sizes(example, options.name).items() if not size]:
            raise BucketedError(f"the example has size 0 on axis '{empty[0]}'; expected at least 1")
        # Its values serve later captures: what the caller writes to it is not seen.
        self._example = [each.detach() if isinstance(each, Tensor) else each for each in example]
        for index in self._dims:
            self._example[index] = self._example[index].clone()
        self._try_eagerly(call)

    def inputs_at(self, sizes: Mapping[str, int]) -> list[Any]:
        """Make flat inputs of other sizes, from the example."""
        return self.axes.resized(self._example, sizes)

    def keep_state(self) -> Callable[[], None]:
        """Return a function that restores the parameters and buffers that are written to."""
        saved = [(tensor, tensor.detach().clone()) for _, tensor in self._state]

        def restore() -> None:
            with torch.no_grad():
                for tensor, value in saved:
                    tensor.copy_(value)

        return restore

    def sizes_to_compare(self) -> Iterator[dict[str, int]]:
        """Sizes between the buckets, which not every callable takes, then those of a bucket."""
        tried = self._sizes_to_try()
        low = {axis: sizes[0] for axis, sizes in tried.items()}
        between = {
            axis: sizes[-2] + 1 if len(sizes) > 1 and axis not in self._options.exact else sizes[0]
            for axis, sizes in tried.items()
        }
        yield from (between, low)

    def comparable(self, outputs: Sequence[Any], expected: Sequence[Any]) -> list[Any]:
        """Cut dimensions that follow an axis, but are annotated not to be cut."""
        cut = [*outputs]
        for index, shape in zip(self._tensors, self._shapes, strict=True):
            if expected[index].dim() != len(shape) or cut[index].dim() != len(shape):
                continue
            for dim, size in enumerate(shape):
                least = min(expected[index].shape[dim], cut[index].shape[dim])
                if size is None:
                    cut[index] = cut[index].narrow(dim, 0, least)
        return cut

    def check_split(self, axis: str) -> None:
        """Check that joined results of parts equal those of the whole.

        Raises:
            BucketedError: they do not, or an output does not follow the axis in one dimension.
        """
        along = [cut.output for cut in self._follows if cut.axis == axis]
        if rest := [index for index in self._tensors if along.count(index) != 1]:
            found = "does not follow" if rest[0] not in along else "follows in two dimensions"
            raise BucketedError(
                f"overflow='split': output '{self._outputs.names[rest[0]]}' {found} "
                f"'{axis}', so results of parts cannot be joined: choose another overflow"
            )
        low = {each: sizes[0] for each, sizes in self._sizes_to_try().items()}
        whole = {**low, axis: 2 * low[axis]}
        restore = self.keep_state()

        def inputs() -> list[Any]:
            restore()
            return self.axes.resized(self._example, whole, distinct=True)

        def run(values: Sequence[Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
            found = self._outputs.take(self._eager(self._call, sizes, values))
            if found is None:
                raise BucketedError(
                    f"overflow='split': the outputs have another structure at {_shown(sizes)}"
                )
            return found

        try:
            in_parts, at_once = inputs(), inputs()
            parts = [run(part, low) for part in self.split(in_parts, axis, whole[axis], low[axis])]
            got = self.join(parts, axis)
            state = [tensor.clone() for _, tensor in self._state]
            restore()
            expected = run(at_once, whole)
            written = [(self.axes.inputs[i], in_parts[i], at_once[i]) for i in self._written]
            for (name, now), was in zip(self._state, state, strict=True):
                written.append((name, was, now.clone()))
        finally:
            restore()
        for name, one, other in written:
            if differs(one, other):
                raise BucketedError(
                    f"overflow='split': each part writes to '{name}' in place, and the whole "
                    "writes something else: choose another overflow"
                )
        for index, name in enumerate(self._outputs.names):
            if found := differs(got[index], expected[index]):
                raise BucketedError(
                    f"overflow='split': joined results of parts along '{axis}' are not those of "
                    f"the whole: output '{name}' {found}: choose another overflow"
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

    def _try_eagerly(self, call: FlatCall) -> None:
        tried = self._sizes_to_try()
        low = {axis: sizes[0] for axis, sizes in tried.items()}
        base_inputs = self.inputs_at(low)
        versions = [_version(each) for each in base_inputs]
        own = tensors_of(getattr(self._function, "__self__", self._function))
        written = watch_writes(own)
        base = self._eager(call, low, base_inputs)
        names = written()
        self._state = [
            (name, tensor) for name, tensor in own if name in names and not tensor.is_inference()
        ]
        restore = self.keep_state()
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
                restore()
                result = self._outputs.take(self._eager(call, sizes, self.inputs_at(sizes)))
                if result is None:
                    raise BucketedError(
                        f"the outputs have another structure at {_shown(sizes)} than at "
                        f"{_shown(low)}: return the same containers at all sizes"
                    )
                runs.append(Run(sizes, result))
        self._follows = find_cuts(self._outputs.names, runs, self._options.outputs)
        self._shapes = shapes_of(self._tensors, runs, self._follows)
        self._refuse_lost_writes()
        try:
            if self._options.check:
                self._check_padding(call, tried, restore)
        finally:
            restore()

    def _sizes_to_try(self) -> dict[str, list[int]]:
        """The three smallest sizes of each axis; a bucket and half of it if it is the only one.

        Size 0 is left out, since everything is a multiple of it.
        """
        found = {}
        for axis in self.axes.names:
            sizes = sorted({bucket[axis] for bucket in self._options.ladder if bucket[axis]})[:3]
            sizes = sizes or [1]
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

    def _refuse_lost_writes(self) -> None:
        exact = self._options.exact
        lost = [index for index in self._written if {*self._dims.get(index, {}).values()} - exact]
        if lost:
            raise BucketedError(
                f"input '{self.axes.inputs[lost[0]]}' is written in place, and its padded copy "
                "would be written instead: return the result, or keep it as a buffer"
            )

    def _check_padding(
        self, call: FlatCall, tried: Mapping[str, Sequence[int]], restore: Callable[[], None]
    ) -> None:
        """Compare runs through padding with those without: at the least sizes, and between two."""
        low = {axis: sizes[0] for axis, sizes in tried.items()}
        exact = self._options.exact
        bucket = {a: low[a] if a in exact else s[min(1, len(s) - 1)] for a, s in tried.items()}
        top = {a: low[a] if a in exact else s[-1] for a, s in tried.items()}
        one = {a: size if a in exact else 1 for a, size in low.items()}
        between = next(self.sizes_to_compare())
        for real, padded in ((low, bucket), (one, low), (between, top)):
            for change in (list, self._other_signs, self._negatives):
                self._check_at(call, real, padded, restore, change)

    def _check_at(
        self,
        call: FlatCall,
        sizes: Mapping[str, int],
        bucket: Mapping[str, int],
        restore: Callable[[], None],
        change: Callable[[list[Any]], list[Any]],
    ) -> None:
        if bucket == sizes:
            return

        def real() -> list[Any]:
            restore()
            values = change(self.axes.resized(self._example, sizes, distinct=True))
            # What padding writes must differ from what is there, such as zeros.
            for each in (
                *(tensor for _, tensor in self._state),
                *(values[i] for i in self._written),
            ):
                if each.is_floating_point():
                    with torch.no_grad():
                        each.add_(1)
            return values

        def padded() -> list[Any]:
            return self._padded(real(), bucket)

        inputs = real()
        try:
            expected = self._outputs.take(self._eager(call, sizes, inputs))
        except BucketedError:  # such as a convolution that cannot have this size
            return
        if expected is None:
            return
        expected = tuple(each.clone() if isinstance(each, Tensor) else each for each in expected)
        state = [tensor.clone() for _, tensor in self._state]
        filled = padded()
        outputs = self._outputs.take(self._eager(call, bucket, filled))
        if outputs is None:
            raise BucketedError("results depend on padding: the outputs have another structure")

        def why() -> str:
            with torch.no_grad():
                return mixing_module(self._function, lambda: call(*real()), lambda: call(*padded()))

        got = self.comparable(cut_outputs(outputs, self._follows, sizes), expected)
        check_equal(self._outputs.names, got, expected, why)
        states = [
            (name, tensor, was) for (name, tensor), was in zip(self._state, state, strict=True)
        ]
        states += [(self.axes.inputs[i], filled[i], inputs[i]) for i in self._written]
        for name, now, was in states:
            if found := differs(now, was):
                raise BucketedError(
                    f"results depend on padding: '{name}' is written in place and {found}; write "
                    "where a mask says so, choose pad=, or pass check=False if nothing reads that"
                )

    def _padded(self, inputs: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
        padded = [*inputs]
        for index, dims in self._dims.items():
            at = {dim: sizes[axis] for dim, axis in dims.items()}
            padded[index] = padded_copy(inputs[index], at, self._pads[index])
        return padded

    # Signs and sizes that the example lacks, which a maximum or the largest k over padding need to
    # show. Masks of 0 and 1 stay, as their negative means nothing.

    def _other_signs(self, inputs: list[Any]) -> list[Any]:
        return self._changed(inputs, _other_values)

    def _negatives(self, inputs: list[Any]) -> list[Any]:
        return self._changed(inputs, lambda tensor: -tensor.abs() - 1)

    def _changed(self, inputs: list[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
        return [
            change(each)
            if index in self._dims
            and each.is_floating_point()
            and not ((each == 0) | (each == 1)).all()
            else each
            for index, each in enumerate(inputs)
        ]


def _other_values(tensor: Tensor) -> Tensor:
    at = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    return tensor * torch.where(at % 3 == 0, 1, -3).to(tensor.dtype)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shown(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())
