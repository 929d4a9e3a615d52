"""Copies many tensors at once, through torch's `_foreach` operation where it works."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["copy_all"]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target, which has its shape, dtype and device."""
    try:
        torch._foreach_copy_(targets, sources)
    except (AttributeError, TypeError, NotImplementedError):  # not in this torch, or this device
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
