"""The fused CPU kernel: paged attention for any mix of requests as one op; see docs/kernels.md."""

from __future__ import annotations

from compiled_attn.kernels.native.build import Build, build, default_folder
from compiled_attn.kernels.native.errors import KernelArgumentError, NativeUnavailable
from compiled_attn.kernels.native.ints import as_int32
from compiled_attn.kernels.native.isa import ISAS, available_isas, best_isa
from compiled_attn.kernels.native.kernel import (
    CHOICES,
    KernelChoice,
    NativeKernel,
    PagedRequest,
    cache_lacks,
    chooses_native,
)
from compiled_attn.kernels.native.op import NativeOps, load, unavailable

__all__ = [
    "CHOICES",
    "ISAS",
    "Build",
    "KernelArgumentError",
    "KernelChoice",
    "NativeKernel",
    "NativeOps",
    "NativeUnavailable",
    "PagedRequest",
    "as_int32",
    "available_isas",
    "best_isa",
    "build",
    "cache_lacks",
    "chooses_native",
    "default_folder",
    "load",
    "unavailable",
]
