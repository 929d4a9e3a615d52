"""The fused CPU kernel: paged attention for any mix of requests as one op; see docs/kernels.md."""

from __future__ import annotations

from compiled_attn.ops.choose import (
    CHOICES,
    KernelChoice,
    NativeKernel,
    PagedRequest,
    cache_lacks,
    chooses_native,
)
from compiled_attn.ops.cpu.build import Build, build, default_folder
from compiled_attn.ops.cpu.isa import ISAS, available_isas, best_isa
from compiled_attn.ops.errors import KernelArgumentError, NativeUnavailable
from compiled_attn.ops.integers import as_int32
from compiled_attn.ops.paged_attention import NativeOps, load, unavailable

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
