"""Attention over a paged KV cache, for graphs that are captured once and never compile again."""

from compiled_attn.batch import BatchBuilder, Request, StepBatch
from compiled_attn.cache import PagedKVCache
from compiled_attn.partial import (
    PartialAttention,
    lse,
    merge,
    merge_online,
    partial_attn_causal,
    partial_attn_shared,
    partial_attn_unique,
)
from compiled_attn.unified import UnifiedAttention, UnifiedMetadata, unified_attention

__all__ = [
    "BatchBuilder",
    "PagedKVCache",
    "PartialAttention",
    "Request",
    "StepBatch",
    "UnifiedAttention",
    "UnifiedMetadata",
    "lse",
    "merge",
    "merge_online",
    "partial_attn_causal",
    "partial_attn_shared",
    "partial_attn_unique",
    "unified_attention",
]
__version__ = "0.1.0"
