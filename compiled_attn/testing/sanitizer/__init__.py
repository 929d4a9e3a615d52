"""A sanitizer for paged KV caches: finds the step and the request that corrupt one.

Names are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

if TYPE_CHECKING:
    from compiled_attn.testing.sanitizer.api import kv_sanitizer
    from compiled_attn.testing.sanitizer.corrupt import KINDS, CorruptCache
    from compiled_attn.testing.sanitizer.ledger import StepTokens
else:
    _NAMES = {
        "api": "kv_sanitizer",
        "corrupt": "KINDS CorruptCache",
        "ledger": "StepTokens",
    }
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

__all__ = ["KINDS", "CorruptCache", "StepTokens", "kv_sanitizer"]
