"""Attention over a part of the keys, and the merge of such parts into the whole.

A softmax over all keys can be taken over disjoint groups of keys first, as long as every group
keeps its row maximum and row sum (FlashAttention's rescaling, Dao et al. 2022; the split into
causal, shared and unique groups follows the unified attention of the Gaudi vLLM plugin).

Every function computes in float32 for half precision inputs (float64 stays float64): scores, row
statistics and unnormalised outputs alike, so a long context never overflows float16.
Here is the readable definition; `compiled_attn.kernels` holds faster forms of `attend`.
"""

from __future__ import annotations

from compiled_attn.partial.blocks import gather_blocks, usage_bias
from compiled_attn.partial.dense import attend
from compiled_attn.partial.merging import lse, merge, merge_online
from compiled_attn.partial.parts import (
    partial_attn_causal,
    partial_attn_shared,
    partial_attn_sinks,
    partial_attn_unique,
)
from compiled_attn.partial.state import FEPS, FMIN, Attend, PartialAttention

__all__ = [
    "FEPS",
    "FMIN",
    "Attend",
    "PartialAttention",
    "attend",
    "gather_blocks",
    "lse",
    "merge",
    "merge_online",
    "partial_attn_causal",
    "partial_attn_shared",
    "partial_attn_sinks",
    "partial_attn_unique",
    "usage_bias",
]
