"""Decode attention over a paged cache with the signatures of vLLM's kernels; see docs/paged.md."""

from __future__ import annotations

from compiled_attn.batch import AttentionMetadata
from compiled_attn.paged.attention import PARTITION, paged_attention_v1, paged_attention_v2
from compiled_attn.paged.errors import PagedArgumentError
from compiled_attn.paged.inputs import PagedInputs
from compiled_attn.paged.layouts import (
    LAYOUTS,
    Layout,
    convert_key,
    convert_value,
    empty_caches,
    key_shape,
    packing,
    value_shape,
)
from compiled_attn.paged.module import PagedAttention
from compiled_attn.paged.reference import paged_attention_reference
from compiled_attn.paged.write import reshape_and_cache

__all__ = [
    "LAYOUTS",
    "PARTITION",
    "AttentionMetadata",
    "Layout",
    "PagedArgumentError",
    "PagedAttention",
    "PagedInputs",
    "convert_key",
    "convert_value",
    "empty_caches",
    "key_shape",
    "packing",
    "paged_attention_reference",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "value_shape",
]
