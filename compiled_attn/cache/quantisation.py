"""Rows of a cache in 8 bits: ``real value = stored value * scale``, one scale per token and head.

Source: per-token, per-head dynamic quantisation of the KV cache as in FlexGen (Sheng et al., 2023)
and the int8 caches of inference engines; symmetric, without a zero point.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["KV_DTYPES", "QUANTISED", "dequantise", "encode", "largest", "quantise"]

QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Element types that need a scale."""

KV_DTYPES = MappingProxyType({"int8": torch.int8, "fp8": torch.float8_e4m3fn})
"""Those that an engine keeps keys and values in, by name: of the two fp8 the finer one, as the
scale of each token and head already gives what range the other would."""


def largest(dtype: torch.dtype) -> float:
    """The largest stored value of a quantised dtype, the same in both directions."""
    return torch.finfo(dtype).max if dtype.is_floating_point else 127.0


def encode(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Values that are divided by their scale already, rounded to nearest and saturated."""
    limit = largest(dtype)
    rounded = scaled if dtype.is_floating_point else scaled.round()
    return rounded.clamp(-limit, limit).to(dtype)


def quantise(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows ``[..., D]`` as codes ``[..., D]`` of ``dtype`` and scales ``[...]`` in float32.

    The largest element of each row becomes the largest code, so the error of an element is at most
    half a step: ``max|row| / 254`` for int8; for fp8 1/16 (e4m3) or 1/8 (e5m2) of the element, or
    where that is more half a step between the smallest codes, ``max|row| / 458752`` (e4m3).
    """
    rows = rows.float()
    scale = rows.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * 2**16) / largest(dtype)
    return encode(rows / scale.unsqueeze(-1), dtype), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 rows that codes ``[..., D]`` and scales ``[...]`` stand for."""
    return codes.float() * scale.unsqueeze(-1)
