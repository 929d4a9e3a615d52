"""FlashAttention's own `flash_attn_with_kvcache`; needs its package and a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.adapters import package
from compiled_attn.testing.capabilities import Capabilities

__all__ = ["CAPABILITIES", "flash_attn_with_kvcache"]

CAPABILITIES = Capabilities(
    features=frozenset({
        "chunked", "shared_prefix", "window", "softcap", "alibi", "noncausal", "lse", "append",
        "rotary", "empty_rows", "replay",
    }),
    dtypes=(torch.float16, torch.bfloat16),
    head_dims=(64, 128, 256),
    block_sizes=(256,),
    device="cuda",
)  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Calls ``flash_attn.flash_attn_with_kvcache`` (FlashAttention 2.8)."""
    module = package("flash_attn", "pip install flash-attn, on a machine with CUDA")
    return module.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, softmax_scale, causal, window_size, softcap,
        rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse,
    )  # fmt: skip
