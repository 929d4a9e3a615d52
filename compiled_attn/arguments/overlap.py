"""Memory that a call both writes and reads, for instance as an index."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

__all__ = ["can_read", "overlap"]


def overlap(written: Mapping[str, object], read: Mapping[str, object]) -> tuple[str, str] | None:
    """The names of something read and something written that share memory, or None.

    A tensor is taken for all bytes from its first element to its last: one that lies in the gaps of
    another shares memory with it, one elsewhere in the same storage does not. What is written may
    share memory with each other (interleaved keys and values). While compiling or capturing, and of
    tensors without memory, nothing is compared. All are on one device; what is no tensor is left
    out.
    """
    tensors = [(name, each) for name, each in written.items() if isinstance(each, Tensor)]
    if not tensors or not can_read(tensors[0][1]):
        return None
    spans = [(*_span(each), name) for name, each in tensors]
    lowest, highest = min(spans)[0], max(end for _, end, _ in spans)
    for name, each in read.items():
        # Most tensors lie elsewhere, which one address tells.
        if isinstance(each, Tensor) and each.data_ptr() < highest:
            first, end = _span(each)
            if end > lowest:
                for other_first, other_end, other in spans:
                    if first < other_end and other_first < end:
                        return name, other
    return None


def can_read(tensor: Tensor) -> bool:
    """Whether numbers may be read now: not while compiling or capturing, nor from a tensor that has
    none (meta, fake).
    """
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of one past the last."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize
