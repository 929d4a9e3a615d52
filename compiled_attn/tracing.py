"""What attention must know of the compiler that may be tracing it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["can_read", "stands_alone"]


def can_read(tensor: Tensor) -> bool:
    """Whether numbers may be read now: not while compiling or capturing, nor from a meta tensor."""
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def stands_alone(cache: Tensor) -> bool:
    """Whether the cache is no view, nor has gaps in which another tensor may have its elements.

    Of any other cache a compiler turns a write into a copy of what is written to.
    """
    if cache._base is not None:
        return False
    expected = 1
    for stride, size in sorted(zip(cache.stride(), cache.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
