"""FlashAttention's `flash_attn_with_kvcache` on any device; see docs/flash.md."""

from __future__ import annotations

from compiled_attn.compat.flash.api import (
    flash_attn_with_kvcache,
    flash_attn_with_kvcache_reference,
)
from compiled_attn.compat.flash.module import FlashInputs, FlashKVCacheAttention
from compiled_attn.errors import FlashArgumentError

__all__ = [
    "FlashArgumentError",
    "FlashInputs",
    "FlashKVCacheAttention",
    "flash_attn_with_kvcache",
    "flash_attn_with_kvcache_reference",
]
