"""Integers as the ops take them, so that a number that does not fit is refused, not wrapped."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_int32"]

_RANGE = torch.iinfo(torch.int32)


def as_int32(ints: Tensor) -> Tensor:
    """Block ids, lengths or offsets in int32; -1, which the ops refuse, is what does not fit."""
    if ints.dtype == torch.int32:
        return ints
    if ints.dtype == torch.int64:
        ints = torch.where((ints >= _RANGE.min) & (ints <= _RANGE.max), ints, -1)
    return ints.int()
