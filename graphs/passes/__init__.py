"""Inductor passes that a capture can ask for: ``capture(..., options=passes.for_cpu())``."""

from __future__ import annotations

from graphs.passes.onednn_linear import OneDnnLinear, for_cpu

__all__ = ["OneDnnLinear", "for_cpu"]
