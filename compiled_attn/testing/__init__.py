"""Tests for whoever writes a paged attention kernel, or an engine around one.

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
else:
    _NAMES = {
        "capabilities": "FEATURES Capabilities CapabilityError",
        "kit.interface": "Interface",
        "kit.report": "Report",
        "kit.run": "check",
    }
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)

__all__ = ["FEATURES", "Capabilities", "CapabilityError", "Interface", "Report", "check"]
