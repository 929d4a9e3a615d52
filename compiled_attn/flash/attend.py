"""Attention of a batch of rows over a slice of their keys, as a `PartialAttention` that merges with other slices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_attn.partial import FMIN, PartialAttention

__all__ = ["attend_slice"]

_MOST_FUSED_ROWS = 16
"""Up to so many query rows of a KV head, product and sum beat a matmul in a compiled graph (see `_dot`)."""


def attend_slice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    used: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float,
) -> PartialAttention:
    """Scores, cap, bias, mask and exponentials, in float32 for half precision inputs.

    Args:
        query: ``[B, Sq, H, D]``.
        key, value: ``[B, N, Hk, D]``; query head h reads key head ``h // (H // Hk)``.
        seen: ``[B, Sq, N]`` bool.
        used: ``[B, N]`` bool; elsewhere key and value may be NaN, which 0 * NaN would let out.
        bias: ``[B, H, Sq, N]`` or None, added after the cap.
        scale: factor of the scores.
        softcap: cap c of ``c * tanh(score / c)`` if positive.

    Shape:
        - out ``[B, H, Sq, D]``, max and sum ``[B, H, Sq]``
    """
    batch, queries, heads, dim = query.shape
    kv_heads, group = key.shape[2], heads // key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = query.to(dtype).unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4) * scale
    rows = rows.reshape(batch, kv_heads, group * queries, dim)
    value = torch.where(used[:, :, None, None], value, 0).to(dtype)

    scores = _dot(rows, key.to(dtype).permute(0, 2, 3, 1)).view(batch, heads, queries, -1)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = torch.where(seen.unsqueeze(1), scores, -math.inf)
    row_max = scores.amax(-1).clamp_min(FMIN)
    weights = torch.exp(scores - row_max.unsqueeze(-1))
    out = _dot(weights.view(batch, kv_heads, group * queries, -1), value.transpose(1, 2))
    return PartialAttention(out.view(batch, heads, queries, dim), row_max, weights.sum(-1))


def _dot(rows: Tensor, columns: Tensor) -> Tensor:
    """``[B, Hk, M, K] @ [B, Hk, K, N]``.

    For few rows in a compiled graph as product and sum, which fuse with the gather that makes ``columns``: no buffer
    of the size of the gathered keys exists. A matmul of more than one row is a library call on a copy of them.
    """
    if torch.compiler.is_compiling() and rows.shape[2] <= _MOST_FUSED_ROWS:
        return (rows.unsqueeze(-1) * columns.unsqueeze(2)).sum(-2)
    return torch.matmul(rows, columns)
