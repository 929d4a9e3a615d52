"""vLLM's `paged_attention_v1` and `_v2` on any device; see docs/reference/paged.md."""

from __future__ import annotations

from compiled_attn.compat.paged.api import (
    PARTITION,
    paged_attention_reference,
    paged_attention_v1,
    paged_attention_v2,
)
from compiled_attn.compat.paged.layouts import (
    LAYOUTS,
    Layout,
    convert_key,
    convert_value,
    empty_caches,
    key_shape,
    packing,
    value_shape,
)
from compiled_attn.compat.paged.module import PagedAttention, PagedInputs
from compiled_attn.compat.paged.reshape_and_cache import reshape_and_cache
from compiled_attn.errors import PagedArgumentError
from compiled_attn.step import AttentionMetadata

__all__ = [
    "LAYOUTS", "PARTITION", "AttentionMetadata", "Layout", "PagedArgumentError", "PagedAttention",
    "PagedInputs", "convert_key", "convert_value", "empty_caches", "key_shape", "packing",
    "paged_attention_reference", "paged_attention_v1", "paged_attention_v2", "reshape_and_cache",
    "value_shape",
]  # fmt: skip
