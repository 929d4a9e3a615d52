"""What `compiled_attn.ops.paged_attention` registers of every op besides C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compiled_attn.ops import lora, packed_linear, quantised_linear, reference, sampling
from compiled_attn.ops.states import register as states

__all__ = ["FAKES", "IN_PYTHON"]


def _fake(query: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any, **__: Any) -> Any:
    tokens, heads = query.shape[:2]
    out = query.new_empty(tokens, heads, value_cache.shape[3])
    return out, query.new_empty(tokens, heads, dtype=torch.float32)


def _fake_write(query: Tensor, key: Tensor, value: Tensor, *caches: Any, **_: Any) -> Any:
    return _fake(query, *caches)


IN_PYTHON: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "paged_attention": reference.paged_attention,
        "paged_attention_": reference.paged_attention_,
        "packed_linear": packed_linear.reference,
        "packed_linears": packed_linear.reference_all,
        "packed_swiglu": packed_linear.reference_swiglu,
        "packed_rows": packed_linear.rows,
        "quantised_linear": quantised_linear.reference,
        "quantised_linears": quantised_linear.reference_all,
        "quantised_swiglu": quantised_linear.reference_swiglu,
        "quantised_rows": quantised_linear.reference_rows,
        "add_lora": lora.reference,
        "sample_tokens": sampling.reference,
        **states.IN_PYTHON,
    }
)
"""The references by name of the op."""

FAKES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "paged_attention": _fake,
        "paged_attention_": _fake_write,
        "packed_linear": packed_linear.fake,
        "packed_linears": packed_linear.fake_all,
        "packed_swiglu": packed_linear.fake_swiglu,
        "packed_rows": packed_linear.fake_rows,
        "quantised_linear": quantised_linear.fake,
        "quantised_linears": quantised_linear.fake_all,
        "quantised_swiglu": quantised_linear.fake_swiglu,
        "quantised_rows": quantised_linear.fake_rows,
        "add_lora": lora.fake,
        "sample_tokens": sampling.fake,
        **states.FAKES,
    }
)
"""What compilers see of the ops."""
