"""Parts of one memory as tensors of their own: inputs that a compiler takes to be independent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

from torch import Tensor
from torch.utils import dlpack

from graphs.capture.inputs import Input, overlaps

__all__ = ["separated"]


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
