"""The oracle as a kernel: supports everything."""

from __future__ import annotations

from compiled_attn.attention.dense import attend
from compiled_attn.attention.kernel import AttendRequest

__all__ = ["ReferenceKernel"]


class ReferenceKernel:
    """`compiled_attn.attention.dense.attend` itself."""

    name = "reference"
    attend = staticmethod(attend)

    def supports(self, request: AttendRequest) -> str | None:
        """Everything is supported."""
        return None
