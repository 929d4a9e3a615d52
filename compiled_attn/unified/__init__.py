"""Unified attention: a mixed engine step in one call; see docs/unified.md."""

from __future__ import annotations

from compiled_attn.unified.attention import unified_attention
from compiled_attn.unified.metadata import UnifiedMetadata
from compiled_attn.unified.module import UnifiedAttention
from compiled_attn.unified.write import write_cache

__all__ = ["UnifiedAttention", "UnifiedMetadata", "unified_attention", "write_cache"]
