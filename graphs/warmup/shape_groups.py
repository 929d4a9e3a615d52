"""Shape groups: buckets that differ only in symbolic sizes, so that they can share a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from graphs.buckets.axes import Bucket
from graphs.capture.inputs import Input
from graphs.capture.symbolic import SymbolicSizes

__all__ = ["ShapeGroups"]

_ANY = 2  # stands for every size that torch has a symbol for


class ShapeGroups:
    """Shape groups of a set of buckets, and the symbolic sizes that each group shares.

    Two buckets are in one group if they have equal sizes on all axes that are not symbolic, and
    sizes below 2, for which torch has no symbols, on the same axes.

    Args:
        name: of the callable.
        axes: whose sizes are symbolic.
        buckets: all there are.
        make_inputs: makes the example inputs of a bucket.

    Raises:
        ValueError: there is no such axis.
    """

    def __init__(
        self,
        name: str,
        axes: Sequence[str],
        buckets: Iterable[Bucket],
        make_inputs: Callable[[Bucket], Sequence[Input]],
    ) -> None:
        self._name = name
        self._axes = frozenset(axes)
        self._make_inputs = make_inputs
        self._members: dict[Bucket, list[Bucket]] = {}
        self._sizes: dict[Bucket, SymbolicSizes] = {}
        for bucket in buckets:
            if unknown := self._axes.difference(bucket):
                raise ValueError(
                    f"symbolic has {min(unknown)!r}; expected axes of the buckets: "
                    f"{', '.join(bucket)}"
                )
            self._members.setdefault(self.key(bucket), []).append(bucket)

    def key(self, bucket: Bucket) -> Bucket:
        """Return the same bucket for all members of a group."""
        sizes = {a: min(n, _ANY) if a in self._axes else n for a, n in bucket.items()}
        return Bucket(**sizes)

    def sizes_of(self, bucket: Bucket) -> SymbolicSizes | None:
        """Return what a bucket shares with its group; None if it is the only member.

        May call `make_inputs` for several buckets, which may return views of the same memory: make
        the inputs to run on afterwards.
        """
        key = self.key(bucket)
        if all(other == bucket for other in self._members.get(key, ())):
            return None
        if key not in self._sizes:
            others = [*self._inputs_of_others(bucket)]
            dims = _varying_dims(self._make_inputs(bucket), others)
            axes = (a if a in self._axes and n == _ANY else f"{a}={n}" for a, n in key.items())
            self._sizes[key] = SymbolicSizes(f"{self._name}[{' '.join(axes)}]", dims)
        return self._sizes[key]

    def clear(self) -> None:
        """Release the shared graphs."""
        self._sizes.clear()

    def _inputs_of_others(self, bucket: Bucket) -> Iterator[Sequence[Input]]:
        # For each symbolic axis one member with another size.
        members = self._members[self.key(bucket)]
        for axis in sorted(self._axes):
            other = next((each for each in members if each[axis] != bucket[axis]), None)
            if other is not None:
                with contextlib.suppress(Exception), torch.no_grad():  # its own capture says why
                    yield self._make_inputs(other)


def _varying_dims(
    inputs: Sequence[Input], others: Sequence[Sequence[Input]]
) -> list[tuple[int, ...]]:
    """For each input, the dimensions of at least 2 whose size differs in the inputs of `others`."""
    return [
        tuple(
            dim
            for dim, size in enumerate(value.shape)
            if size > 1 and any(size != _size(other, index, dim, value) for other in others)
        )
        if isinstance(value, Tensor)
        else ()
        for index, value in enumerate(inputs)
    ]


def _size(others: Sequence[Input], index: int, dim: int, like: Tensor) -> int:
    other = others[index] if index < len(others) else None
    is_alike = isinstance(other, Tensor) and other.dim() == like.dim()
    return other.shape[dim] if is_alike else like.shape[dim]  # type: ignore[union-attr]
