"""Large buffers on huge pages, so that scattered blocks need fewer page table walks."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.utils import _python_dispatch

__all__ = ["THREAD", "touched_later", "zeros"]

THREAD = "compiled-attn touches pages"

_HUGE_PAGE = 2 * 2**20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_later: ContextVar[list[Tensor] | None] = ContextVar("buffers to touch later", default=None)


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
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    if (later := _later.get()) is None:
        whole[:: mmap.PAGESIZE] = 0
    else:
        later.append(whole)
    return whole.view(dtype).view(*shape)


@contextmanager
def touched_later() -> Iterator[None]:
    """Context whose buffers are touched in a thread that starts at its end.

    Meanwhile they may be used. On systems that cannot do that, each page waits for its first write.
    """
    buffers: list[Tensor] = []
    token = _later.set(buffers)
    try:
        yield
    finally:
        _later.reset(token)
    if buffers:
        threading.Thread(target=_populate, args=(buffers,), name=THREAD, daemon=True).start()


def _populate(buffers: Sequence[Tensor]) -> None:
    madvise = ctypes.CDLL(None).madvise  # that of Python holds the GIL
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    with suppress(OSError):  # of Linux, for this thread alone: kernels need their processors
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    for buffer in buffers:
        for begin in range(0, len(buffer), _HUGE_PAGE):
            size = min(_HUGE_PAGE, len(buffer) - begin)
            if madvise(buffer.data_ptr() + begin, size, _POPULATE_WRITE):
                return


def _has_dispatch_mode() -> bool:
    mode = getattr(_python_dispatch, "_get_current_dispatch_mode", None)
    return mode is not None and mode() is not None
