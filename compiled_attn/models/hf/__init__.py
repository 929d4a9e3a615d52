"""Unmodified Hugging Face causal language models on the paged cache (extra ``hf``).

`PagedCausalLM` wraps a model so that one call computes a step: the tokens of all requests flattened
to ``[1, T]``, attention over the paged cache instead of a Hugging Face cache, logits only for the
rows that need them. The model's own code runs; only its attention function is ours, through
`transformers.AttentionInterface`. docs/models.md lists the families.
"""

from __future__ import annotations

from compiled_attn.errors import ModelChanged, ModelRefused
from compiled_attn.models.hf.attention import ATTENTION_NAME, PagedStep, paged_attention_forward
from compiled_attn.models.hf.model import PagedCausalLM
from compiled_attn.models.hf.shapes import cache_for, context_limit

__all__ = [
    "ATTENTION_NAME",
    "ModelChanged",
    "ModelRefused",
    "PagedCausalLM",
    "PagedStep",
    "cache_for",
    "context_limit",
    "paged_attention_forward",
]
