"""Kernels that replace Triton's on CUDA where they are faster, fastest of those that can serve.

`compiled_attn.ops.triton.autotune` measures them during a warmup; none is a requirement.
"""

from __future__ import annotations

from compiled_attn.ops.providers.base import Paged, Provider
from compiled_attn.ops.providers.dense_paged import DensePaged
from compiled_attn.ops.providers.descriptors import Descriptors
from compiled_attn.ops.providers.fa3 import FlashAttention3
from compiled_attn.ops.providers.flashinfer import FlashInfer
from compiled_attn.ops.providers.varlen import VarlenKernel

__all__ = ["PROVIDERS", "UNPROVEN", "Paged", "Provider"]

_ALL: tuple[Provider, ...] = (
    VarlenKernel(), DensePaged(), FlashAttention3(), FlashInfer(),
    Descriptors("descriptors", specialized=False), Descriptors("specialized", specialized=True),
)  # fmt: skip

PROVIDERS: dict[str, Provider] = {each.name: each for each in _ALL}
"""By name, in the order in which they are measured."""

UNPROVEN = frozenset({"specialized"})
"""Names that warmups do not measure: no device has run them yet, and a kernel that waits for a
wrong barrier would never end a warmup. Plans that name them use them."""
