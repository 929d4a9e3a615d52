"""transformers' attention ``sdpa``, as its continuous batching calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.testing.adapters import package
from compiled_attn.testing.adapters.transformers_eager import attend
from compiled_attn.testing.capabilities import Capabilities

__all__ = ["CAPABILITIES", "paged_attention"]

CAPABILITIES = Capabilities(
    features=frozenset({"chunked", "mixed", "shared_prefix", "window"}),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    head_dims=(16, 64, 80, 128),
    block_sizes=(16, 32, 256),
)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    window: int | None = None,
) -> Tensor:
    """Computes ``torch.ops.compiled_attn.paged_attention`` without its log-sum-exp."""
    module = package("transformers.integrations.sdpa_attention", "pip install transformers")
    return attend(
        module.sdpa_attention_forward, query, key_cache, value_cache, block_table, seq_lens,
        query_start_loc, window=window, module={}, scaling=scale, is_causal=False,
    )  # fmt: skip
