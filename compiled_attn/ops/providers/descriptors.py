"""Triton's kernel for prompts, which copies tiles by tensor descriptors (TMA)."""

from __future__ import annotations

from torch import Tensor

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.providers import flash
from compiled_attn.ops.providers.base import Paged

__all__ = ["Descriptors"]

_MAX_DIM = 128  # larger ones spill registers
_TRITON = (3, 9)  # whose compiler specialises warps; that of 3.6 ends the process


class Descriptors:
    """The kernel of `compiled_attn.ops.triton.prompt`, pipelined or with specialised warps."""

    def __init__(self, name: str, *, specialized: bool) -> None:
        self.name = name
        self._specialized = specialized

    def version(self) -> str:
        """See `compiled_attn.ops.providers.Provider`."""
        return ""

    def why_not(self, call: PagedCall) -> str | None:
        """See `compiled_attn.ops.providers.Provider`."""
        if lacks := flash.lacks_device(call.query.device):
            return lacks
        major, minor = flash.capability(call.query.device)
        if major < 9:
            return f"needs sm_90 or later, not sm_{major}{minor}"
        if self._specialized and major != 9:
            return f"has specialised warps on sm_90, not on sm_{major}{minor}"
        dim = call.query.shape[2]
        if (self._specialized or major == 12) and dim > _MAX_DIM:
            return f"has head sizes up to {_MAX_DIM} on sm_{major}{minor}, not {dim}"
        import triton

        from compiled_attn.ops.triton.prompt_launch import why_not

        found = tuple(map(int, triton.__version__.split(".")[:2]))
        if self._specialized and found < _TRITON:
            return f"needs Triton {_TRITON[0]}.{_TRITON[1]} or newer, not {triton.__version__}"
        return why_not(call)

    def attend(self, call: PagedCall, paged: Paged) -> tuple[Tensor, Tensor]:
        """See `compiled_attn.ops.providers.Provider`."""
        from compiled_attn.ops.triton.prompt_launch import attend

        return attend(call, paged, specialized=self._specialized)
