"""The op ``paged_attention``: attention over a paged cache; see docs/reference/kernels.md."""

from __future__ import annotations

from compiled_attn.errors import KernelArgumentError, NativeUnavailable
from compiled_attn.ops.call import NewTokens, PagedCall
from compiled_attn.ops.choose import (
    CHOICES,
    KernelChoice,
    NativeKernel,
    as_int32,
    attend_paged,
    choose,
    chooses_native,
    unavailable,
    unit_strides,
)
from compiled_attn.ops.cpu.build import build
from compiled_attn.ops.cpu.isa import available_isas
from compiled_attn.ops.cpu.libraries import default_folder
from compiled_attn.ops.paged_attention import NativeOps, load
from compiled_attn.ops.rows import write_rows
from compiled_attn.ops.traits import AttentionTraits, Implementation

__all__ = [
    "CHOICES", "AttentionTraits", "Implementation", "KernelArgumentError", "KernelChoice",
    "NativeKernel", "NativeOps", "NativeUnavailable", "NewTokens", "PagedCall", "as_int32",
    "attend_paged", "available_isas", "build", "choose", "chooses_native", "default_folder", "load",
    "unavailable", "unit_strides", "write_rows",
]  # fmt: skip
