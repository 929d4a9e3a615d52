"""Tests for whoever writes a paged attention kernel, or an engine around one.

Names are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

if TYPE_CHECKING:
    from compiled_attn.testing.sanitizer import CorruptCache, StepTokens, kv_sanitizer
else:
    _NAMES = {
        "sanitizer": "CorruptCache StepTokens kv_sanitizer",
    }
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

__all__ = ["CorruptCache", "StepTokens", "kv_sanitizer"]
