"""Attention over a paged KV cache, for graphs that are captured once and never compile again.

Names are imported lazily (PEP 562), so that a command's help needs no torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from compiled_attn.shadow import refuse_foreign_graphs

# pytest imports this package for its plugin (entry point), also in unrelated projects with another
# `graphs`. That import passes; then the plugin removes the package from sys.modules again, and a
# later import raises the error.
if "_pytest.config" not in sys.modules or "compiled_attn.pytest_plugin" in sys.modules:
    refuse_foreign_graphs()

if TYPE_CHECKING:
    from compiled_attn.attention.merge import lse, merge, merge_online
    from compiled_attn.attention.metadata import UnifiedMetadata
    from compiled_attn.attention.module import UnifiedAttention
    from compiled_attn.attention.parts import (
        partial_attn_causal,
        partial_attn_shared,
        partial_attn_unique,
    )
    from compiled_attn.attention.rotary import apply_rotary
    from compiled_attn.attention.state import PartialAttention
    from compiled_attn.attention.unified import unified_attention
    from compiled_attn.cache.kv_cache import PagedKVCache
    from compiled_attn.compat.flash import (
        FlashArgumentError,
        FlashInputs,
        FlashKVCacheAttention,
        flash_attn_with_kvcache,
    )
    from compiled_attn.compat.paged import (
        PagedAttention,
        PagedInputs,
        paged_attention_v1,
        paged_attention_v2,
    )
    from compiled_attn.engine.asynchronous import AsyncEngine
    from compiled_attn.score import Scorer, score
    from compiled_attn.step import (
        AttentionMetadata,
        BatchBuilder,
        Request,
        RequestTable,
        StepBatch,
        StepPlan,
        TableBatch,
        TablePlan,
    )
    from compiled_attn.text.llm import LLM
else:
    _NAMES = {
        "attention.merge": "lse merge merge_online",
        "attention.metadata": "UnifiedMetadata",
        "attention.module": "UnifiedAttention",
        "attention.parts": "partial_attn_causal partial_attn_shared partial_attn_unique",
        "attention.rotary": "apply_rotary",
        "attention.state": "PartialAttention",
        "attention.unified": "unified_attention",
        "cache.kv_cache": "PagedKVCache",
        "compat.flash": "FlashArgumentError FlashInputs FlashKVCacheAttention "
        "flash_attn_with_kvcache",
        "compat.paged": "PagedAttention PagedInputs paged_attention_v1 paged_attention_v2",
        "engine.asynchronous": "AsyncEngine",
        "score": "Scorer score",
        "step": "AttentionMetadata BatchBuilder Request RequestTable StepBatch StepPlan "
        "TableBatch TablePlan",
        "text.llm": "LLM",
    }

    def __getattr__(name: str) -> Any:
        # Do not import `graphs` for unknown names, of which pytest looks up many.
        if not any(name in names.split() for names in _NAMES.values()):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        refuse_foreign_graphs()
        from graphs.lazy import lazy_names

        import_name, _ = lazy_names(__name__, _NAMES)
        return import_name(name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *" ".join(_NAMES.values()).split()})


__all__ = [
    "LLM",
    "AsyncEngine",
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
    "Scorer",
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
    "score",
    "unified_attention",
]
__version__ = "0.1.0"
