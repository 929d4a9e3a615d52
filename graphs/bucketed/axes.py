"""Which dimensions of the inputs follow which axis: annotated, or found by the example's sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphs.buckets.ladders import explicit
from graphs.buckets.space import BucketSpace
from graphs.errors import BucketedError, InputMismatch

__all__ = ["InputAxes", "ladder_of"]


@dataclass(frozen=True)
class InputAxes:
    """The dimensions of flat inputs that follow an axis.

    Attributes:
        names: of the axes.
        inputs: names of the flat inputs.
        dims: by axis, the (input, dimension) pairs that have its size.
    """

    names: tuple[str, ...]
    inputs: tuple[str, ...]
    dims: Mapping[str, tuple[tuple[int, int], ...]]

    @classmethod
    def annotated(
        cls,
        names: Sequence[str],
        inputs: Sequence[str],
        example: Sequence[Any],
        annotations: Mapping[str, Any],
    ) -> InputAxes:
        """Read annotations such as ``{"ids": ("batch", "length"), "cache": {0: "batch"}}``.

        Args:
            names: of the axes.
            inputs: names of the flat inputs.
            example: the flat inputs.
            annotations: by input; that of a container is of all tensors in it. A sequence has one
                entry per dimension, a mapping one per dimension that follows an axis; an entry is a
                name, a ``torch.export.Dim`` or None.

        Raises:
            BucketedError: an input, a dimension or an axis does not exist, or the example has
                several sizes on one axis.
        """
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        for key, annotation in annotations.items():
            matching = [i for i, name in enumerate(inputs) if _is_in(name, key)]
            if not matching:
                raise BucketedError(
                    f"axes: there is no input {key!r}; expected one of {', '.join(inputs)}"
                )
            for index in matching:
                value = example[index]
                for dim, axis in _entries(annotation, inputs[index], value):
                    if axis not in found:
                        raise BucketedError(
                            f"axes: dimension {dim} of '{inputs[index]}' follows {axis!r}; "
                            f"expected one of {', '.join(names)}"
                        )
                    found[axis].append((index, dim))
        axes = cls(tuple(names), tuple(inputs), {n: tuple(pairs) for n, pairs in found.items()})
        return axes._checked(example)

    @classmethod
    def guessed(
        cls, names: Sequence[str], inputs: Sequence[str], example: Sequence[Any]
    ) -> InputAxes:
        """Find axes by size: the first tensor with enough dimensions has them in order.

        A dimension of another tensor varies with an axis if it has its size; a size of 1, or one
        that two axes share, counts only at the position that it has in the first tensor.

        Raises:
            BucketedError: no tensor has as many dimensions as there are axes.
        """
        tensors = [(i, each) for i, each in enumerate(example) if isinstance(each, Tensor)]
        first = next((each for _, each in tensors if each.dim() >= len(names)), None)
        if first is None:
            raise BucketedError(
                f"no input has the {len(names)} dimensions {', '.join(names)}: say which "
                "dimensions follow them, axes={'input': ('batch', None)}"
            )
        sizes = [*first.shape[: len(names)]]
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        for index, tensor in tensors:
            shape = tensor.shape[: len(names)] if tensor is first else tensor.shape
            for dim, size in enumerate(shape):
                same = [i for i, each in enumerate(sizes) if each == size]
                if dim in same:
                    found[names[dim]].append((index, dim))
                elif len(same) == 1 and size > 1:
                    found[names[same[0]]].append((index, dim))
        return cls(tuple(names), tuple(inputs), {n: tuple(pairs) for n, pairs in found.items()})

    def _checked(self, example: Sequence[Any]) -> InputAxes:
        for axis, pairs in self.dims.items():
            if not pairs:
                raise BucketedError(f"axes: no input follows {axis!r}; name one, or leave it out")
        try:
            self.sizes(example, "axes")
        except InputMismatch as error:
            raise BucketedError(str(error)) from None
        return self

    def sizes(self, inputs: Sequence[Any], where: str) -> dict[str, int]:
        """Return the size of each axis in flat inputs.

        Raises:
            InputMismatch: of the name `where`: two inputs disagree, or one has too few dimensions.
        """
        found: dict[str, int] = {}
        for axis, pairs in self.dims.items():
            for index, dim in pairs:
                shape = getattr(inputs[index], "shape", ())
                if dim >= len(shape):
                    raise InputMismatch(
                        where,
                        f"'{self.inputs[index]}' has {len(shape)} dimensions; expected '{axis}' in "
                        f"dimension {dim}",
                    )
                if found.setdefault(axis, shape[dim]) != shape[dim]:
                    first, at = pairs[0]
                    raise InputMismatch(
                        where,
                        f"axis '{axis}' is {found[axis]} in dimension {at} of "
                        f"'{self.inputs[first]}', and {shape[dim]} in dimension {dim} of "
                        f"'{self.inputs[index]}': pass inputs that agree, or correct axes=",
                    )
        return found

    def of_input(self, index: int) -> dict[int, str]:
        """Return the axis of each dimension of a flat input that follows one."""
        return {dim: axis for axis, pairs in self.dims.items() for i, dim in pairs if i == index}

    def is_of(self, index: int, key: str) -> bool:
        """Whether a flat input is the input `key`, or inside of that container."""
        return _is_in(self.inputs[index], key)

    def resized(
        self, example: Sequence[Any], sizes: Mapping[str, int], distinct: bool = False
    ) -> list[Any]:
        """Copy flat inputs at other sizes: cut, or with their slices repeated.

        Args:
            example: flat inputs.
            sizes: by axis.
            distinct: whether values within repeated slices are rolled, so that slices differ.
        """
        return [
            _resized(each, {dim: sizes[axis] for dim, axis in self.of_input(i).items()}, distinct)
            if isinstance(each, Tensor)
            else each
            for i, each in enumerate(example)
        ]


def _resized(tensor: Tensor, sizes: Mapping[int, int], distinct: bool) -> Tensor:
    for dim, size in sizes.items():
        have = max(tensor.shape[dim], 1)
        at = torch.arange(size, device=tensor.device) % have
        tensor = tensor.index_select(dim, at)
        if distinct:
            for start in range(have, size, have):
                _vary(tensor.narrow(dim, start, min(have, size - start)), dim, start // have)
    return tensor if sizes else tensor.clone()


def _vary(part: Tensor, dim: int, by: int) -> None:
    others = [at for at in range(part.dim()) if at != dim and part.shape[at] > 1]
    if others:
        part.copy_(part.roll(by, others[-1]))
    elif part.is_floating_point():
        part.mul_(1 + by)


def _is_in(name: str, key: str) -> bool:
    return name == key or name.startswith((f"{key}[", f"{key}."))


def _entries(annotation: Any, name: str, value: Any) -> Iterable[tuple[int, str]]:
    if annotation is None or not isinstance(value, Tensor):
        return
    if isinstance(annotation, str) or not isinstance(annotation, (Mapping, Sequence)):
        raise BucketedError(
            f"axes of '{name}' are {annotation!r}; expected one name or None per dimension, such "
            "as ('batch', None), or a dict of dimensions"
        )
    pairs = annotation.items() if isinstance(annotation, Mapping) else enumerate(annotation)
    if not isinstance(annotation, Mapping) and len(annotation) > value.dim():
        raise BucketedError(
            f"axes of '{name}' name {len(annotation)} dimensions; it has {value.dim()}"
        )
    for dim, axis in pairs:
        if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
            raise BucketedError(f"axes: '{name}' has no dimension {dim!r}; it has {value.dim()}")
        if axis is not None:
            yield dim % value.dim(), axis if isinstance(axis, str) else axis.__name__


def ladder_of(axis: str, sizes: Any) -> BucketSpace:
    """Make the buckets of one axis.

    Args:
        axis: its name.
        sizes: ``(min, max)``: min, twice that and so on, and max; a list or range: exactly these; a
            ``torch.export.Dim`` with a maximum; a one-axis BucketSpace.

    Raises:
        BucketedError: they are something else, or empty.
    """
    if isinstance(sizes, BucketSpace):
        if sizes.names != (axis,):
            raise BucketedError(f"{axis}: its buckets have the axes {', '.join(sizes.names)}")
        return sizes
    expected = "expected (min, max), a list of sizes, or a Dim with a maximum"
    if hasattr(sizes, "min") and hasattr(sizes, "max"):
        if not isinstance(sizes.max, int) or sizes.max >= sys.maxsize - 1:
            raise BucketedError(f"{axis}: the Dim {sizes.__name__!r} has no maximum; {expected}")
        sizes = (max(1, int(sizes.min)), sizes.max)
    try:
        if isinstance(sizes, (list, range)):
            return explicit([axis], sorted(sizes))
    except (TypeError, ValueError) as error:
        raise BucketedError(f"{axis}={sizes!r}: {expected} ({error})") from None
    if not isinstance(sizes, tuple) or len(sizes) != 2 or not all(type(n) is int for n in sizes):
        raise BucketedError(
            f"{axis}={sizes!r}: {expected}; if {axis!r} is meant as an option, there is none of "
            "that name (those of the backend go into options={...})"
        )
    low, high = sizes
    if not 0 <= low <= high:
        raise BucketedError(f"{axis}={sizes!r}: {expected}, with 0 <= min <= max")
    steps = [low << bit for bit in range((high // low).bit_length())] if low else []
    return explicit([axis], sorted({*steps, low, high}))
