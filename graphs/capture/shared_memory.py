"""Inputs that share memory: a graph without guards of its own holds only where none do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from graphs.capture.inputs import Input, parameter_names

__all__ = ["Apart", "memory_shared_by"]


def memory_shared_by(function: Callable[..., Any], inputs: Sequence[Input]) -> str:
    """Say which input overlaps another, or a parameter or buffer of the callable; else empty."""
    names = parameter_names(function, len(inputs))
    given = [(n, *_range(v)) for n, v in zip(names, inputs, strict=True) if _has_memory(v)]
    for (name, start, end), (other, other_start, other_end) in combinations(given, 2):
        if start < other_end and other_start < end:
            return f"inputs '{name}' and '{other}' share memory"
    if isinstance(function, nn.Module):
        for named in (function.named_parameters(), function.named_buffers()):
            for own, tensor in named:
                start, end = _range(tensor) if _has_memory(tensor) else (0, 0)
                for name, other_start, other_end in given:
                    if start < other_end and other_start < end:
                        return f"input '{name}' shares memory with '{own}'"
    return ""


class Apart:
    """Whether no two inputs are one tensor, in a fraction of a microsecond.

    Args:
        function: what takes them.
        places: of those that are tensors.
    """

    def __init__(self, function: Callable[..., Any], places: Sequence[int]) -> None:
        self._names = parameter_names(function, max(places, default=-1) + 1)
        self._places = [*places]

    def mismatch(self, inputs: Sequence[Input]) -> str:
        """Name two inputs that are one tensor; empty where there are none."""
        places = self._places
        if len({id(inputs[place]) for place in places}) == len(places):
            return ""
        first: dict[int, str] = {}
        for place in places:
            before = first.setdefault(id(inputs[place]), self._names[place])
            if before != self._names[place]:
                return f"inputs '{before}' and '{self._names[place]}' are one tensor"
        return ""


def _has_memory(value: Any) -> bool:
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided
    return is_strided and value.numel() > 0 and value.data_ptr() > 0


def _range(tensor: Any) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
