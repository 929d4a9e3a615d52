"""Faster forms of `compiled_attn.attention.dense.attend`; each says what it supports, and why not.

`choose` picks the first kernel that supports a request and falls back to the reference.
"""

from __future__ import annotations

from compiled_attn.attention.kernel import AttendRequest, Kernel
from compiled_attn.attention.kernel_reference import ReferenceKernel
from compiled_attn.attention.sdpa import SdpaKernel

__all__ = ["KERNELS", "AttendRequest", "Kernel", "ReferenceKernel", "SdpaKernel", "choose"]

KERNELS: tuple[Kernel, ...] = (SdpaKernel(), ReferenceKernel())
"""Every kernel, fastest first."""


def choose(request: AttendRequest, kernels: tuple[Kernel, ...] = KERNELS) -> Kernel:
    """The first kernel that supports the request.

    Raises:
        RuntimeError: none does; the message lists each with its reason.
    """
    reasons = {}
    for kernel in kernels:
        reason = kernel.supports(request)
        if reason is None:
            return kernel
        reasons[kernel.name] = reason
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise RuntimeError(f"expected a kernel that supports {request}, got none: {listed}")
