"""Pads inputs into buffers that all buckets share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from graphs.bucketed.axes import InputAxes
from graphs.errors import BucketedError

__all__ = ["Pad", "PadTail", "padded_copy", "pads_of", "tails_of"]

Pad: TypeAlias = "bool | int | float | Literal['repeat']"


def pads_of(axes: InputAxes, example: Sequence[Any], given: Mapping[str, Pad]) -> dict[int, Pad]:
    """Return the padding of each flat input that follows an axis.

    Args:
        axes: of the inputs.
        example: flat inputs.
        given: a value, or ``repeat`` for the last real slice, by input; that of a container is of
            all tensors in it. Default: 0, and False for bools.

    Raises:
        BucketedError: there is no such input, or its dtype cannot have the value.
    """
    pads: dict[int, Pad] = {}
    for index, value in enumerate(example):
        if isinstance(value, Tensor) and axes.of_input(index):
            pads[index] = 0
    for key, pad in given.items():
        matching = [index for index in pads if axes.is_of(index, key)]
        if not matching:
            names = ", ".join(axes.inputs[index] for index in pads)
            raise BucketedError(f"pad: there is no padded input {key!r}; expected one of {names}")
        for index in matching:
            if pad != "repeat":
                _check(axes.inputs[index], example[index], pad)
            pads[index] = pad
    return pads


def _check(name: str, value: Tensor, pad: Any) -> None:
    try:
        held = torch.full((), pad, dtype=value.dtype)
    except (RuntimeError, TypeError, ValueError):
        held = None
    is_rounded = value.is_floating_point() and held is not None and not held.isinf()
    if held is None or (held.item() != pad and not is_rounded):
        raise BucketedError(
            f"pad: '{name}' is {str(value.dtype).removeprefix('torch.')} and cannot hold {pad!r}; "
            "expected a number of that dtype, or 'repeat'"
        )


class PadTail:
    """The part of a buffer behind the real values on one dimension.

    Args:
        buffer: of the bucket's shape, or a part of it that the dimensions before have cut.
        dim: the dimension.
        size: of the real values, at least 1 for ``repeat``.
        pad: what to fill in.
    """

    def __init__(self, buffer: Tensor, dim: int, size: int, pad: Pad) -> None:
        self._tail = buffer.narrow(dim, size, buffer.shape[dim] - size)
        repeats = pad == "repeat" and size > 0
        self._last = buffer.narrow(dim, size - 1, 1) if repeats else None
        self._pad = 0 if pad == "repeat" else pad

    @property
    def is_constant(self) -> bool:
        """Whether it stays valid while real values change."""
        return self._last is None

    def fill(self) -> None:
        """Write the padding; the real values, and tails of earlier dimensions, are there."""
        if self._last is None:
            self._tail.fill_(self._pad)
        else:
            self._tail.copy_(self._last.expand_as(self._tail))


def tails_of(buffer: Tensor, sizes: Mapping[int, int], pad: Pad) -> tuple[Tensor, list[PadTail]]:
    """Return the real part of a buffer, and its tails in the order to fill them.

    Args:
        buffer: of the bucket's shape.
        sizes: real size by dimension.
        pad: see :func:`pads_of`.
    """
    tails: list[PadTail] = []
    real = buffer
    for dim, size in sizes.items():
        real = real.narrow(dim, 0, size)
    # The last dimension first: its tail is as long as the real part of those before.
    done = buffer
    for dim, size in sizes.items():
        if size < done.shape[dim]:
            tails.append(PadTail(done, dim, size, pad))
        done = done.narrow(dim, 0, size)
    return real, tails[::-1]


def padded_copy(tensor: Tensor, sizes: Mapping[int, int], pad: Pad) -> Tensor:
    """Return a copy of a tensor, padded to other sizes."""
    shape = [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]
    buffer = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    real, tails = tails_of(buffer, {dim: tensor.shape[dim] for dim in sizes}, pad)
    real.copy_(tensor)
    for tail in tails:
        tail.fill()
    return buffer
