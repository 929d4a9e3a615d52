"""Example inputs as Dynamo is to see them: parts of a buffer apart, some sizes as symbols."""

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

__all__ = ["marked", "separated"]

_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


def separated(inputs: Sequence[Input]) -> list[Input]:
    """Inputs that are parts of one buffer, and overlap no other, as tensors of the same memory.

    Dynamo tells from storages, not from addresses, whether inputs alias, and refuses those in
    regions that are compiled once (``torch.compiler.nested_compile_region``). What is compiled for
    independent inputs is right for parts that do not overlap.
    """
    storages = Counter(_storage(value) for value in inputs if isinstance(value, Tensor))
    parts = [v for v in inputs if isinstance(v, Tensor) and storages[_storage(v)] > 1]
    pairs = [pair for pair in combinations(parts, 2) if overlaps(*pair)]
    kept = {id(each) for pair in pairs for each in pair}
    own = {id(each): _own(each) for each in parts if id(each) not in kept}
    return [own.get(id(value), value) for value in inputs]


def _storage(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)


def _own(value: Any) -> Tensor:
    """The tensor over a storage of its own; itself, where that would be another kind of tensor."""
    own: Tensor = value
    if type(value) is not Tensor or value.requires_grad or value.is_inference():
        return own
    through: Any = dlpack
    with suppress(RuntimeError, BufferError, ValueError):
        own = through.from_dlpack(through.to_dlpack(value))
    return own


@contextmanager
def marked(examples: Sequence[Input], dims: Sequence[Sequence[int]]) -> Iterator[None]:
    """Make a compile inside treat these dimensions of each example as symbols.

    A size that the callable fixes stays fixed, and becomes a guard. Equal sizes get symbols of
    their own: that they are equal here says nothing of other buckets.
    """
    # Not `torch.compile(dynamic_shapes=)`: its sizes are unbacked, and cannot be compared.
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
