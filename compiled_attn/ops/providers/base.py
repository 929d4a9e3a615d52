"""What a kernel must offer to replace Triton's where a warmup measures it to be faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from compiled_attn.ops.call import PagedCall

__all__ = ["Paged", "Provider"]

Paged: TypeAlias = Callable[[PagedCall], tuple[Tensor, Tensor]]
"""Computes a call by the Triton kernel, with the tiles and splits of its plan."""


class Provider(Protocol):
    """A kernel of ``paged_attention`` for CUDA.

    It must be usable in a captured graph: sizes come from shapes, and the host reads no tensor.
    """

    name: str

    def version(self) -> str:
        """Returns what its speed depends on, besides torch, Triton and the sources of this
        package: measured plans are only used again with the same."""

    def why_not(self, call: PagedCall) -> str | None:
        """Returns why it cannot serve a call here, or None; reads no tensor."""

    def attend(self, call: PagedCall, paged: Paged) -> tuple[Tensor, Tensor]:
        """Computes out ``[T, H, Dv]`` and lse ``[T, H]`` of a call it can serve.

        The caches already hold the new tokens. ``paged`` computes parts of it by Triton.
        """
