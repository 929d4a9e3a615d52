"""What a kernel is: a form of `attend` that declares what it can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compiled_attn.attention.state import PartialAttention

__all__ = ["AttendRequest", "Kernel"]


@dataclass(frozen=True)
class AttendRequest:
    """The properties of an attention that decide which kernel can serve it."""

    device: str
    dtype: torch.dtype
    head_dim: int
    softcap: bool = False


class Kernel(Protocol):
    """One implementation of `compiled_attn.attention.dense.attend`."""

    name: str

    def supports(self, request: AttendRequest) -> str | None:
        """None if the kernel can serve the request, else why not."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        fmin: float = ...,
    ) -> PartialAttention:
        """See `compiled_attn.attention.dense.attend`."""
