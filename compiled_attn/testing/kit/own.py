"""What this project's own functions claim: `python -m compiled_attn.testing
compiled_attn.testing.kit.own:flash_attn_with_kvcache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from compiled_attn import (
    flash_attn_with_kvcache,
    paged_attention_v1,
    paged_attention_v2,
    unified_attention,
)
from compiled_attn.ops.reference import paged_attention, paged_attention_
from compiled_attn.testing.capabilities import Capabilities
from compiled_attn.testing.kit.interfaces import Flash, Op, OpWrite, PagedV1
from compiled_attn.testing.kit.unified import Unified

__all__ = [
    "CAPABILITIES",
    "flash_attn_with_kvcache",
    "paged_attention",
    "paged_attention_",
    "paged_attention_v1",
    "paged_attention_v2",
    "unified_attention",
]

_SIZES: dict[str, Any] = {
    "dtypes": (torch.float32, torch.bfloat16, torch.float16),
    "head_dims": (32, 64), "block_sizes": (16, 4),
}  # fmt: skip
_PAGED = Capabilities(PagedV1.features, **_SIZES)
_OP = Op.features - {"int64_tables"}

CAPABILITIES: Mapping[str, Capabilities] = MappingProxyType({
    "flash_attn_with_kvcache": Capabilities(Flash.features, **_SIZES),
    "paged_attention_v1": _PAGED, "paged_attention_v2": _PAGED,
    "unified_attention": Capabilities(Unified.features, **_SIZES),
    "paged_attention": Capabilities(_OP, **_SIZES),
    "paged_attention_": Capabilities(OpWrite.features - {"int64_tables"}, **_SIZES),
})  # fmt: skip
"""Claims by name. Kernels of the op support what its reference supports."""
