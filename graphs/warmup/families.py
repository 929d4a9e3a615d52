"""Families of buckets that differ in symbolic sizes alone, so that they can share a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from graphs.buckets.axes import Bucket
from graphs.capture.inputs import Input
from graphs.capture.symbolic import SymbolicSizes

__all__ = ["Families"]

_ANY = 2  # any size that torch has a symbol for


class Families:
    """What the buckets of each family share.

    Two buckets are of one family if they have the same sizes on all axes that are not symbolic, and
    sizes below 2, for which torch has no symbols, in the same places. A bucket without others like
    it has no family.

    Args:
        name: of the callable.
        axes: whose sizes are symbols.
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
        self._shared: dict[Bucket, SymbolicSizes] = {}
        for bucket in buckets:
            if unknown := self._axes.difference(bucket):
                raise ValueError(
                    f"symbolic has {min(unknown)!r}; expected axes of the buckets: "
                    f"{', '.join(bucket)}"
                )
            self._members.setdefault(self.kind(bucket), []).append(bucket)

    def of(self, bucket: Bucket) -> SymbolicSizes | None:
        """What a bucket shares with its family; None if it has none.

        It may make inputs of several buckets. These may lie in the same memory, so inputs to run on
        are made afterwards.
        """
        kind = self.kind(bucket)
        if all(other == bucket for other in self._members.get(kind, ())):
            return None
        if kind not in self._shared:
            others = [*self._inputs_of_others(bucket)]
            dims = _sizes_that_differ(self._make_inputs(bucket), others)
            told = (a if a in self._axes and n == _ANY else f"{a}={n}" for a, n in kind.items())
            self._shared[kind] = SymbolicSizes(f"{self._name}[{' '.join(told)}]", dims)
        return self._shared[kind]

    def kind(self, bucket: Bucket) -> Bucket:
        """What the buckets of a family have in common; the bucket itself without symbolic axes."""
        sizes = {a: min(n, _ANY) if a in self._axes else n for a, n in bucket.items()}
        return Bucket(**sizes)

    def firsts(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """The first bucket of each family."""
        first: dict[Bucket, Bucket] = {}
        for bucket in buckets:
            first.setdefault(self.kind(bucket), bucket)
        return [*first.values()]

    def forget(self) -> None:
        """Let go of what was shared."""
        self._shared.clear()

    def _inputs_of_others(self, bucket: Bucket) -> Iterator[Sequence[Input]]:
        """Of one bucket of the family with another size, for each axis."""
        members = self._members[self.kind(bucket)]
        for axis in sorted(self._axes):
            other = next((each for each in members if each[axis] != bucket[axis]), None)
            if other is not None:
                with contextlib.suppress(Exception), torch.no_grad():  # its own capture says why
                    yield self._make_inputs(other)


def _sizes_that_differ(
    inputs: Sequence[Input], others: Sequence[Sequence[Input]]
) -> list[tuple[int, ...]]:
    """For each input, the dimensions whose size differs in the inputs of another bucket.

    Sizes below 2 do not count, as torch cannot have a symbol for these. An input that is no
    tensor, or one of another rank there, has none.
    """
    return [
        tuple(
            dim
            for dim, size in enumerate(value.shape)
            if size > 1 and any(size != _size(other, place, dim, value) for other in others)
        )
        if isinstance(value, Tensor)
        else ()
        for place, value in enumerate(inputs)
    ]


def _size(others: Sequence[Input], place: int, dim: int, like: Tensor) -> int:
    other = others[place] if place < len(others) else None
    is_alike = isinstance(other, Tensor) and other.dim() == like.dim()
    return other.shape[dim] if is_alike else like.shape[dim]  # type: ignore[union-attr]
