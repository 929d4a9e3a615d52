"""Functions that create the tensors of a step.

The script of a failing case contains their source, so they use torch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "bits",
    "filled",
    "ints",
    "normal",
    "padded",
    "tensors_in",
    "uniform",
    "units",
    "widened",
]


def normal(seed: int, shape: Sequence[int], dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """Returns normal random numbers, equal on all machines."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def uniform(seed: int, shape: Sequence[int], least: float, most: float) -> Tensor:
    """Returns uniform random float32 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator) * (most - least) + least


def units(elements: Sequence[Sequence[int]], dim: int, dtype: torch.dtype) -> Tensor:
    """Returns rows ``[n, heads, dim]`` of zeros with one other element each, or none for -1."""
    at = torch.tensor(elements, dtype=torch.int64).unsqueeze(-1)
    # 255 / 128 is the last number before 2 in bfloat16: an error of 1 % moves it by more than eps.
    return (torch.arange(dim).eq(at) * 1.9921875).to(dtype)


def ints(values: Any, dtype: torch.dtype) -> Tensor:
    """Returns nested lists as a tensor."""
    return torch.tensor(values, dtype=dtype)


def filled(shape: Sequence[int], rest: float, at: Sequence[Sequence[int]], rows: Tensor) -> Tensor:
    """Returns a tensor with ``rows`` at ``at`` (blocks, offsets), and ``rest`` elsewhere."""
    if rows.dtype == torch.int8:
        rest = min(max(rest, -127.0), 127.0) if rest == rest else 127.0
    tensor = torch.full(shape, rest).to(rows.dtype)
    for block, slot, row in zip(*at, rows, strict=True):
        tensor[block, slot] = row
    return tensor


def padded(rows: Tensor, total: int) -> Tensor:
    """Returns rows, padded with NaN to ``total`` rows."""
    rest = torch.full((total - len(rows), *rows.shape[1:]), float("nan"), dtype=rows.dtype)
    return torch.cat([rows, rest])


def widened(tensor: Tensor, axis: int) -> Tensor:
    """Returns an equal view into a tensor that is larger by one along an axis."""
    shape = list(tensor.shape)
    shape[axis] += 1
    wide = torch.zeros(shape, dtype=torch.float32, device=tensor.device).to(tensor.dtype)
    view = wide.narrow(axis, 1, tensor.shape[axis])
    return view.copy_(tensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested containers and objects, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_in(vars(value))


def bits(*values: Any) -> list[Tensor]:
    """Returns copies of the whole storages of tensors, as bytes."""
    storages = {}
    for each in tensors_in(values):
        storages[each.untyped_storage().data_ptr()] = each
    return [
        torch.empty(0, dtype=torch.uint8, device=each.device).set_(each.untyped_storage()).clone()
        for each in storages.values()
    ]
