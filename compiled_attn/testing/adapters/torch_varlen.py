"""Torch's ``torch.nn.attention.varlen.varlen_attn`` over pages; needs a GPU and FA3 or FA4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.adapters import package
from compiled_attn.testing.capabilities import Capabilities

__all__ = ["CAPABILITIES", "varlen_attn"]

CAPABILITIES = Capabilities(
    features=frozenset({
        "chunked", "mixed", "shared_prefix", "window", "noncausal", "lse", "empty_rows", "replay",
    }),
    dtypes=(torch.float16, torch.bfloat16),
    head_dims=(64, 128, 256),
    block_sizes=(128, 256),
    device="cuda",
)  # fmt: skip


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Any:
    """Calls ``torch.nn.attention.varlen.varlen_attn`` of torch 2.12 and later."""
    module = package("torch.nn.attention.varlen", "use torch 2.12 or later")
    return module.varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale,
        window_size=window_size, enable_gqa=enable_gqa, seqused_k=seqused_k,
        block_table=block_table,
    )  # fmt: skip
