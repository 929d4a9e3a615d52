"""Counts the bytes that interpreted kernels read and write, by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

OTHERS = "others"
"""The name of memory that is none of the tensors."""


@dataclass
class Counted:
    """The loads and stores of programs: bytes of an element, and the distinct addresses."""

    loads: list[tuple[int, Any]] = field(default_factory=list)
    stores: list[tuple[int, Any]] = field(default_factory=list)

    def read(self, tensors: Mapping[str, Tensor | None]) -> Counter[str]:
        """Bytes read, by tensor; each operation of a program counts an element once."""
        return _by_tensor(self.loads, tensors)

    def written(self, tensors: Mapping[str, Tensor | None]) -> Counter[str]:
        """Bytes written, by tensor."""
        return _by_tensor(self.stores, tensors)


@contextmanager
def counted() -> Iterator[Counted]:
    """Counts what interpreted kernels load and store meanwhile, except atomically."""
    from triton.runtime.interpreter import InterpreterBuilder

    found = Counted()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        found.loads.append(_operation(pointers, mask))
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found.stores.append(_operation(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        patch.object(InterpreterBuilder, "create_masked_store", counted_store),
    ):
        yield found


def _operation(pointers: Any, mask: Any) -> tuple[int, Any]:
    size = pointers.get_element_ty().primitive_bitwidth // 8
    return size, np.unique(pointers.data[mask.data.astype(bool)]).astype(np.int64)


def _by_tensor(
    operations: list[tuple[int, Any]], tensors: Mapping[str, Tensor | None]
) -> Counter[str]:
    spans = {name: _span(each) for name, each in tensors.items() if each is not None}
    found: Counter[str] = Counter()
    for size, addresses in operations:
        if not addresses.size:
            continue
        inside = [
            name
            for name, (begin, end) in spans.items()
            if addresses[-1] >= begin and addresses[0] < end
        ]
        assert len(inside) <= 1, f"one operation reaches {inside}"
        for name in inside:
            assert spans[name][0] <= addresses[0] and addresses[-1] < spans[name][1]
        found[inside[0] if inside else OTHERS] += size * addresses.size
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first element and after its last."""
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps) if tensor.numel() else -1
    return begin, begin + (last + 1) * tensor.element_size()
