"""Copies many tensors at once, through torch's `_foreach` operations where it has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["copy_all"]


def _one_by_one(targets: Sequence[Tensor], sources: Sequence[Any]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


copy_all: Callable[[Sequence[Tensor], Sequence[Any]], object] = getattr(
    torch, "_foreach_copy_", _one_by_one
)
