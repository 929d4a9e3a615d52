"""Names of our attentions in `transformers.AttentionInterface`."""

from __future__ import annotations

__all__ = ["ATTENTION_NAME", "RECORDER_NAME"]

ATTENTION_NAME = "compiled_attn"
"""Attention over the paged cache."""

RECORDER_NAME = "compiled_attn_recorder"
"""Notes how it is called, and computes nothing."""
