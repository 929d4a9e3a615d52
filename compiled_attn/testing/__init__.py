"""Test tools for authors of paged attention kernels and of inference engines.

Names are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

if TYPE_CHECKING:
    from compiled_attn.testing.capabilities import FEATURES, Capabilities, CapabilityError
    from compiled_attn.testing.kit.interface import Interface
    from compiled_attn.testing.kit.report import Report
    from compiled_attn.testing.kit.run import check
    from compiled_attn.testing.sanitizer import CorruptCache, StepTokens, kv_sanitizer
else:
    _NAMES = {
        "capabilities": "FEATURES Capabilities CapabilityError",
        "kit.interface": "Interface",
        "kit.report": "Report",
        "kit.run": "check",
        "sanitizer": "CorruptCache StepTokens kv_sanitizer",
    }
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

__all__ = [
    "FEATURES",
    "Capabilities",
    "CapabilityError",
    "CorruptCache",
    "Interface",
    "Report",
    "StepTokens",
    "check",
    "kv_sanitizer",
]
