"""8-bit K/V: ``real value = stored value * scale``, with one scale per token and head.

Source: per-token, per-head dynamic quantisation of the KV cache as in FlexGen (Sheng et al., 2023)
and the int8 caches of inference engines; symmetric, without a zero point.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["KV_DTYPES", "QUANTISED", "dequantise", "encode", "largest", "quantise"]

QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Element types with a scale."""

KV_DTYPES = MappingProxyType({"int8": torch.int8, "fp8": torch.float8_e4m3fn})
"""Element types of an engine's cache, by name. fp8 is e4m3, as scales make up for its range."""


def largest(dtype: torch.dtype) -> float:
    """Returns the largest stored value of a quantised dtype, which is symmetric."""
    return torch.finfo(dtype).max if dtype.is_floating_point else 127.0


def encode(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds scaled values to nearest, and saturates them."""
    limit = largest(dtype)
    rounded = scaled if dtype.is_floating_point else scaled.round()
    return rounded.clamp(-limit, limit).to(dtype)


def quantise(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantises rows ``[..., D]`` to ``[..., D]`` of ``dtype`` and float32 scales ``[...]``.

    The largest element of a row becomes the largest stored value, so the error of an element is at
    most ``max|row| / 254`` for int8, and 1/16 (e4m3) or 1/8 (e5m2) of the element for fp8, or half
    the smallest step, ``max|row| / 458752`` (e4m3), if that is more.
    """
    rows = rows.float()
    scale = rows.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * 2**16) / largest(dtype)
    return encode(rows / scale.unsqueeze(-1), dtype), scale


def dequantise(stored: Tensor, scale: Tensor) -> Tensor:
    """Returns the float32 rows of stored values ``[..., D]`` with scales ``[...]``."""
    return stored.float() * scale.unsqueeze(-1)
