"""Detects inputs that overlap in memory at a run but did not at the capture.

A compiler may reorder reads and writes of disjoint tensors, so a graph that writes to one of two
that overlap would compute something else than its callable.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, combinations
from operator import itemgetter
from typing import Any

from torch import Tensor

from graphs.capture.inputs import (
    Input,
    byte_range,
    has_memory,
    parameter_names,
    ranges_overlap,
    tensors_of,
)

__all__ = ["InputOverlaps", "named_tensors", "watch_writes"]

_MOST_KNOWN = 64


def named_tensors(
    function: Callable[..., Any], inputs: Sequence[Input]
) -> list[tuple[str, Tensor]]:
    """Name what a call may write to: inputs by parameter, parameters and buffers as `self.name`."""
    names = parameter_names(function, len(inputs))
    given = [(n, v) for n, v in zip(names, inputs, strict=True) if isinstance(v, Tensor)]
    return given + [(f"self.{name}", tensor) for name, tensor in tensors_of(function)]


def watch_writes(tensors: Iterable[tuple[str, Tensor]]) -> Callable[[], frozenset[str]]:
    """Return a function that names the tensors that may have been written to since now.

    Inference tensors have no version counter, so they are always among them.
    """
    before = [(n, t, None if t.is_inference() else t._version) for n, t in tensors]
    return lambda: frozenset(n for n, t, v in before if v is None or t._version != v)


class InputOverlaps:
    """Checks that inputs overlap no tensor that they did not overlap at the capture.

    It compares pairs of which the graph writes to one: two inputs, or an input and a parameter or
    buffer. Addresses that passed before take a fraction of a microsecond.

    Args:
        function: what was captured.
        examples: of the capture.
        written: what the graph may write to, as from `watch_writes`; None: anything.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        examples: Sequence[Input],
        written: Collection[str] | None,
    ) -> None:
        names = parameter_names(function, len(examples))
        self._function, self._names, self._written = function, names, written
        self._indices = [index for index, value in enumerate(examples) if has_memory(value)]
        ranges = {index: byte_range(examples[index]) for index in self._indices}
        self._sizes = [end - start for start, end in ranges.values()]
        self._pairs = [
            (i, j)
            for i, j in combinations(range(len(self._indices)), 2)
            if (self._writes(names[self._indices[i]]) or self._writes(names[self._indices[j]]))
            and not ranges_overlap(ranges[self._indices[i]], ranges[self._indices[j]])
        ]
        state = self._tensors()
        self._state = _Ranges(state)
        self._written_state = _Ranges([row for row in state if self._writes(row[2])])
        # An example that lies in a parameter or buffer may lie there at every run.
        self._apart = [
            not any(ranges_overlap(own, (start, end)) for start, end, _ in state)
            for own in ranges.values()
        ]
        self._known: set[tuple[int, ...]] = set()
        self._take = itemgetter(*self._indices) if len(self._indices) > 1 else self._take_few

    def hold(self, inputs: Sequence[Input]) -> bool:
        """Whether inputs, which have the layouts of the examples, add no overlap."""
        at = tuple(map(Tensor.data_ptr, self._take(inputs)))
        return at in self._known or self._look(at)

    def mismatch(self, inputs: Sequence[Input]) -> str:
        """Name two tensors that overlap and did not at the capture, or return an empty string.

        Inputs that are the same tensor are left to the graph, which is stale then.
        """
        ranges = [
            (at, at + size)
            for at, size in zip(map(Tensor.data_ptr, self._take(inputs)), self._sizes, strict=True)
        ]
        names = [self._names[index] for index in self._indices]
        for i, j in self._pairs:
            is_one = inputs[self._indices[i]] is inputs[self._indices[j]]
            if not is_one and ranges_overlap(ranges[i], ranges[j]):
                return (
                    f"inputs '{names[i]}' and '{names[j]}' overlap in memory and did not at the "
                    f"capture, {self._why(names[i], names[j])}: clone() one of them"
                )
        state = self._tensors()
        for name, own, apart in zip(names, ranges, self._apart, strict=True):
            for start, end, other in state:
                writes = self._writes(name) or self._writes(other)
                if apart and writes and ranges_overlap(own, (start, end)):
                    return (
                        f"input '{name}' overlaps '{other}' in memory and did not at the capture, "
                        f"{self._why(name, other)}: clone() the input"
                    )
        return ""

    def _look(self, at: tuple[int, ...]) -> bool:
        ranges = [(start, start + size) for start, size in zip(at, self._sizes, strict=True)]
        if any(ranges_overlap(ranges[i], ranges[j]) for i, j in self._pairs):
            return False
        for index, own, apart in zip(self._indices, ranges, self._apart, strict=True):
            state = self._state if self._writes(self._names[index]) else self._written_state
            if apart and state.overlap(own):
                return False
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(at)
        return True

    def _take_few(self, inputs: Sequence[Input]) -> Sequence[Any]:
        return [inputs[index] for index in self._indices]

    def _tensors(self) -> list[tuple[int, int, str]]:
        return [
            (*byte_range(tensor), f"self.{name}")
            for name, tensor in tensors_of(self._function)
            if has_memory(tensor)
        ]

    def _writes(self, name: str) -> bool:
        return self._written is None or name in self._written

    def _why(self, *names: str) -> str:
        if self._written is None:
            return "and the graph may write to them"
        return f"and the graph writes to '{next(n for n in names if n in self._written)}'"


class _Ranges:
    def __init__(self, rows: Sequence[tuple[int, int, str]]) -> None:
        ordered = sorted(rows)
        self._starts = [start for start, _, _ in ordered]
        self._ends = [*accumulate((end for _, end, _ in ordered), max)]

    def overlap(self, own: tuple[int, int]) -> bool:
        before = bisect_left(self._starts, own[1])
        return before > 0 and self._ends[before - 1] > own[0]
