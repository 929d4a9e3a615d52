"""Kernels that replace Triton's on CUDA where they are faster, fastest of those that can serve.

`compiled_attn.ops.triton.autotune` measures them during a warmup; none is a requirement.
"""

from __future__ import annotations

from compiled_attn.ops.providers.base import Paged, Provider
from compiled_attn.ops.providers.varlen import VarlenKernel

__all__ = ["PROVIDERS", "Paged", "Provider"]

PROVIDERS: dict[str, Provider] = {each.name: each for each in (VarlenKernel(),)}
"""By name, in the order in which they are measured."""
