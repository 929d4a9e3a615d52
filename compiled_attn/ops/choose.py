"""What the native kernel can serve, and the choice between it and the portable forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from compiled_attn.cache.quantisation import QUANTISED
from compiled_attn.ops.errors import KernelArgumentError, NativeUnavailable
from compiled_attn.ops.paged_attention import unavailable

__all__ = [
    "CHOICES",
    "KernelChoice",
    "NativeKernel",
    "PagedRequest",
    "cache_lacks",
    "chooses_native",
]

KernelChoice = Literal["auto", "native", "portable"]
"""``native``: the C++ kernel or an error; ``portable``: plain torch; ``auto``: native if it can."""

CHOICES: tuple[KernelChoice, ...] = get_args(KernelChoice)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PagedRequest:
    """The properties of an attention over a paged cache that decide who can serve it.

    Attributes:
        device: type of the device.
        dtype: of the query.
        cache_dtype: of keys and values.
        other: what else is asked for that the native kernel does not have; empty: nothing.
    """

    device: str
    dtype: torch.dtype
    cache_dtype: torch.dtype
    other: str = ""


class NativeKernel:
    """The C++ kernel behind ``torch.ops.compiled_attn.paged_attention``."""

    name = "native"

    def supports(self, request: PagedRequest) -> str | None:
        """None if the request can be served, else why not; builds the kernel on the first call."""
        return self.lacks(request) or unavailable()

    @staticmethod
    def lacks(request: PagedRequest) -> str | None:
        """`supports`, as if the kernel could be built everywhere."""
        if request.other:
            return request.other
        if request.device != "cpu":
            return f"runs on cpu, not on {request.device}"
        if request.dtype not in _FLOATS:
            return f"computes in float32, bfloat16 and float16, not in {request.dtype}"
        if request.cache_dtype != request.dtype and request.cache_dtype not in QUANTISED:
            return f"has no cache of {request.cache_dtype} for queries of {request.dtype}"
        return None


def cache_lacks(key_cache: Tensor, value_cache: Tensor) -> str:
    """What caches, in any of the layouts, have that the kernel cannot read; empty: nothing."""
    if key_cache.dtype != value_cache.dtype:
        return "has keys and values of one dtype"
    if any(cache.stride(-1) != 1 and cache.shape[-1] != 1 for cache in (key_cache, value_cache)):
        return "reads caches whose last stride is 1"
    return ""


def chooses_native(kernel: KernelChoice, request: PagedRequest) -> bool:
    """Whether the native kernel serves a request; traceable.

    Raises:
        ValueError: there is no such choice.
        KernelArgumentError: it must be native, but the kernel does not support the request.
        NativeUnavailable: it must be native, but the kernel cannot be built here.
    """
    if kernel not in CHOICES:
        raise ValueError(f"expected a kernel of {CHOICES}, got {kernel!r}: choose one of these")
    if kernel == "portable":
        return False
    lacks = NativeKernel.lacks(request)
    reason = unavailable() if lacks is None else lacks
    if kernel == "native" and reason is not None:
        kind = NativeUnavailable if lacks is None else KernelArgumentError
        raise kind(
            f"expected what the native kernel can do, got a call that it cannot serve: {reason}; "
            'take kernel="auto" or "portable"'
        )
    return reason is None
