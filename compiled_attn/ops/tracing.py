"""What attention must know of the compiler that may be tracing it."""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

__all__ = ["can_read", "stands_alone"]


def can_read(tensor: Tensor) -> bool:
    """Whether numbers may be read now: not while compiling or capturing, nor from a tensor that has
    none (meta, fake).
    """
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def stands_alone(cache: Tensor) -> bool:
    """Whether the cache is no view, nor has gaps in which another tensor may have its elements.

    Of any other cache a compiler turns a write into a copy of what is written to.
    """
    if cache.is_contiguous():
        return cache._base is None
    # `index` makes a size that the compiler keeps open a constant of the graph: what torch 2.13
    # makes of writes to interleaved inputs of open sizes is wrong.
    strides, sizes = [index(n) for n in cache.stride()], [index(n) for n in cache.shape]
    if cache._base is not None:
        return False
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
