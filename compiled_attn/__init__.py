"""Attention over a paged KV cache, for graphs that are captured once and never compile again."""

from compiled_attn.batch import (
    AttentionMetadata,
    BatchBuilder,
    Request,
    RequestTable,
    StepBatch,
    StepPlan,
    TableBatch,
    TablePlan,
)
from compiled_attn.cache import PagedKVCache
from compiled_attn.flash import (
    FlashArgumentError,
    FlashInputs,
    FlashKVCacheAttention,
    flash_attn_with_kvcache,
)
from compiled_attn.paged import (
    PagedAttention,
    PagedInputs,
    paged_attention_v1,
    paged_attention_v2,
)
from compiled_attn.partial import (
    PartialAttention,
    lse,
    merge,
    merge_online,
    partial_attn_causal,
    partial_attn_shared,
    partial_attn_unique,
)
from compiled_attn.rotary import apply_rotary
from compiled_attn.unified import UnifiedAttention, UnifiedMetadata, unified_attention

__all__ = [
    "AttentionMetadata",
    "BatchBuilder",
    "FlashArgumentError",
    "FlashInputs",
    "FlashKVCacheAttention",
    "PagedAttention",
    "PagedInputs",
    "PagedKVCache",
    "PartialAttention",
    "Request",
    "RequestTable",
    "StepBatch",
    "StepPlan",
    "TableBatch",
    "TablePlan",
    "UnifiedAttention",
    "UnifiedMetadata",
    "apply_rotary",
    "flash_attn_with_kvcache",
    "lse",
    "merge",
    "merge_online",
    "paged_attention_v1",
    "paged_attention_v2",
    "partial_attn_causal",
    "partial_attn_shared",
    "partial_attn_unique",
    "unified_attention",
]
__version__ = "0.1.0"
