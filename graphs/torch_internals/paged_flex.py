"""Where torch has FlexAttention over pages, which the conformance kit of compiled_attn tests."""

from __future__ import annotations

__all__ = ["PAGED_FLEX"]

PAGED_FLEX = "torch.nn.attention.experimental._paged_attention"
"""Module of its `PagedAttention`; callers say what to do where it cannot be imported."""
