"""Unmodified Hugging Face causal language models on the paged cache (extra ``hf``).

`PagedCausalLM` wraps a model so that one call computes a `StepBatch`: the tokens of all requests
flattened to ``[1, T]``, attention over the paged cache instead of a Hugging Face cache, logits only
where wanted. The model's own code runs; only its attention function is ours, through
`transformers.AttentionInterface`. Which families that serves: docs/reference/models.md.
"""

from __future__ import annotations

from compiled_attn.errors import ModelChanged, ModelRefused
from compiled_attn.hf.attention import ATTENTION_NAME, PagedStep, paged_attention_forward
from compiled_attn.hf.model import PagedCausalLM
from compiled_attn.hf.rope import context_limit
from compiled_attn.hf.shapes import cache_for

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
