"""Prepares example inputs for Dynamo: separates views of a buffer, marks symbolic sizes."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils import dlpack

from graphs.capture.inputs import Input, overlaps

__all__ = ["mark_symbolic", "separate_storages"]

_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


def separate_storages(inputs: Sequence[Input]) -> list[Input]:
    """Give disjoint views of one buffer storages of their own, over the same memory.

    Dynamo decides by storages, not addresses, whether inputs alias, and refuses aliases in regions
    (``torch.compiler.nested_compile_region``). Code compiled for independent inputs is correct for
    disjoint views.
    """
    storages = Counter(_storage(value) for value in inputs if isinstance(value, Tensor))
    parts = [v for v in inputs if isinstance(v, Tensor) and storages[_storage(v)] > 1]
    pairs = [pair for pair in combinations(parts, 2) if overlaps(*pair)]
    shared = {id(each) for pair in pairs for each in pair}
    own = {id(each): _own(each) for each in parts if id(each) not in shared}
    return [own.get(id(value), value) for value in inputs]


def _storage(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)


def _own(value: Any) -> Tensor:
    """The tensor over a storage of its own; unchanged where that would lose its kind."""
    own: Tensor = value
    if type(value) is not Tensor or value.requires_grad or value.is_inference():
        return own
    through: Any = dlpack
    with suppress(RuntimeError, BufferError, ValueError):
        own = through.from_dlpack(through.to_dlpack(value))
    return own


@contextmanager
def mark_symbolic(examples: Sequence[Input], dims: Sequence[Sequence[int]]) -> Iterator[None]:
    """Mark dimensions of each example as symbolic for a compile inside the context.

    A size that the callable fixes stays fixed, and becomes a guard. Equal sizes get different
    symbols, since they may differ in other buckets.
    """
    # Not `torch.compile(dynamic_shapes=)`, whose sizes are unbacked and cannot be compared.
    both = [(x, own) for x, own in zip(examples, dims, strict=False) if isinstance(x, Tensor)]
    tensors = [(tensor, own) for tensor, own in both if own]
    symbols: Any = importlib.import_module("torch.fx.experimental._config")
    with symbols.patch(use_duck_shape=not tensors and symbols.use_duck_shape):
        try:
            for tensor, own in tensors:
                torch._dynamo.maybe_mark_dynamic(tensor, [*own])
            yield
        finally:
            for tensor, _ in tensors:
                for mark in _MARKS:
                    vars(tensor).pop(mark, None)
