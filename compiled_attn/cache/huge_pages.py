"""Large buffers on huge pages, so that scattered blocks need fewer page table walks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _python_dispatch

__all__ = ["zeros"]

_HUGE_PAGE = 2 * 2**20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """`torch.zeros`, on huge pages on the CPU if the system supports them.

    All pages are touched, as the first write to a huge page waits until the system has cleared it.
    Calls `torch.zeros` for buffers smaller than a huge page, on other devices, and under dispatch
    modes such as fake tensors. A buffer on huge pages cannot be resized.
    """
    size = math.prod(shape) * dtype.itemsize
    on_cpu = torch.device(device or torch.get_default_device()).type == "cpu"
    if _ADVICE is None or not on_cpu or size < _HUGE_PAGE or _has_dispatch_mode():
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(_ADVICE)
    except (OSError, OverflowError):  # no huge pages, or too little address space
        return torch.zeros(shape, dtype=dtype, device=device)
    torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE] = 0
    return torch.frombuffer(memory, dtype=dtype).view(*shape)  # keeps the mapping alive


def _has_dispatch_mode() -> bool:
    mode = getattr(_python_dispatch, "_get_current_dispatch_mode", None)
    return mode is not None and mode() is not None
