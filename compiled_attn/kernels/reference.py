"""The oracle as a kernel: supports everything."""

from __future__ import annotations

from compiled_attn import partial
from compiled_attn.kernels.base import AttendRequest

__all__ = ["ReferenceKernel"]


class ReferenceKernel:
    """`compiled_attn.partial.attend` itself."""

    name = "reference"
    attend = staticmethod(partial.attend)

    def supports(self, request: AttendRequest) -> str | None:
        """Everything is supported."""
        return None
