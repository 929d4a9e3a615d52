"""The arguments of one call of paged attention, and scales of quantised caches.

``real value = stored value * scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from compiled_attn.cache import quantisation as quant
from compiled_attn.compat.paged.layouts import Layout, expect
from compiled_attn.ops import AttentionTraits, unit_strides

__all__ = [
    "QUANTISED", "DecodeCall", "Scale", "check_scale", "element_type", "encode", "per_head",
    "stored",
]  # fmt: skip

Scale = float | Tensor
"""A factor for all heads, or a tensor with one element or with one for each KV head."""

QUANTISED: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
    }
)
"""``kv_cache_dtype`` to element type; "auto" means the query's dtype, without scales."""


@dataclass(frozen=True)
class DecodeCall:
    """The arguments common to `paged_attention_v1`, `paged_attention_v2` and `PagedAttention`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    num_kv_heads: int
    scale: float
    block_tables: Tensor
    seq_lens: Tensor
    block_size: int
    max_seq_len: int
    alibi_slopes: Tensor | None
    kv_cache_dtype: str
    k_scale: Scale
    v_scale: Scale
    layout: Layout

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the cache."""
        return self.key_cache.shape[0] // (self.block_size if self.layout == "flat" else 1)

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a row, by its table row and ``max_seq_len``."""
        return min(self.block_tables.shape[1] * self.block_size, self.max_seq_len)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of scores, weights and sums."""
        return torch.promote_types(self.query.dtype, torch.float32)

    def traits(self, *, partitions: bool = False) -> AttentionTraits:
        """Properties that determine which kernels can serve the call."""
        query, caches = self.query, (self.key_cache, self.value_cache)
        cache_dtype = element_type(self.kv_cache_dtype, query.dtype)
        return AttentionTraits(
            query.device.type, query.dtype, (cache_dtype, cache_dtype), query.shape[-1],
            alibi=0 if self.alibi_slopes is None else 1, unit_stride=unit_strides(*caches),
            layout=self.layout, partitions=partitions,
        )  # fmt: skip


def element_type(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Returns the element type of a cache; `PagedArgumentError` for an unknown name."""
    known = ("auto", *QUANTISED)
    expected = f"kv_cache_dtype of {known}"
    expect(kv_cache_dtype in known, expected, kv_cache_dtype, "choose one of these")
    return QUANTISED.get(kv_cache_dtype, model_dtype)


def stored(cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """Views a cache as its element type: fp8 caches are often declared as uint8."""
    return cache.view(QUANTISED[kv_cache_dtype]) if cache.dtype == torch.uint8 else cache


def encode(tokens: Tensor, kv_cache_dtype: str, scale: Scale, like: Tensor) -> Tensor:
    """Converts rows ``[T, Hk, D]`` to cache elements: divided by the scale, rounded, saturated."""
    if kv_cache_dtype == "auto":
        return tokens
    scaled = tokens.float() / per_head(scale, tokens.device).unsqueeze(-1)
    codes = quant.encode(scaled, QUANTISED[kv_cache_dtype])
    return codes.view(torch.uint8) if like.dtype == torch.uint8 else codes


def per_head(scale: Scale, device: torch.device) -> Tensor:
    """Returns a scale as a float32 tensor ``[1]`` or ``[Hk]``."""
    if isinstance(scale, Tensor):
        return scale.float().reshape(-1)
    return torch.full((1,), float(scale), device=device)


def check_scale(name: str, scale: object, num_kv_heads: int, device: torch.device) -> None:
    """Raises unless a scale is a positive number, or a tensor for one or all heads."""
    remedy = "pass a float, or one scale a head"
    if isinstance(scale, Tensor):
        count, what = scale.numel(), f"{name} of 1 or num_kv_heads elements"
        expect(count in (1, num_kv_heads), what, (count, num_kv_heads), remedy)
        expect(scale.is_floating_point(), f"{name} of floats", scale.dtype, "convert it with .to()")
        expect(scale.device == device, f"{name} on {device}", scale.device, "move it with .to()")
    elif isinstance(scale, (int, float)):
        fits = scale > 0
        expect(fits, f"a positive {name}", scale, "pass the scale the cache was written with")
    else:
        got = type(scale).__name__
        raise TypeError(f"{name}: expected a float or a tensor, got {got}: {remedy}")
