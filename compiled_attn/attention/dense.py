"""Dense attention under a bias: the reference of every kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_attn.attention.nonfinite import are_finite, nan_if_seen, zero_others
from compiled_attn.attention.scoring import capped
from compiled_attn.attention.state import FMIN, PartialAttention, has_no_queries, of_no_queries

__all__ = ["attend", "exp_scores"]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    fmin: float = FMIN,
) -> PartialAttention:
    """Computes dense attention of every query against every key under a bias.

    Args:
        query: ``[T, H, D]``.
        key: ``[N, Hk, D]``; query head h reads key head ``h // (H // Hk)``. NaN and infinity in
            ``key`` and ``value`` reach the queries that see them, and no other.
        value: ``[N, Hk, Dv]``.
        bias: ``[T, N]`` or ``[H, T, N]``, added to the scores; -inf hides a key.
        scale: factor of the scores.
        softcap: cap c of ``c * tanh(score / c)``, applied after the scale and before the bias.
        fmin: finite floor of the row maxima.
    """
    queries, heads, _ = query.shape
    if has_no_queries(query):
        return of_no_queries(query, value)
    kv_heads = key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3).flatten(1, 2)
    keys = key.permute(1, 2, 0)
    finite = are_finite(value)
    values = zero_others(finite, value).permute(1, 0, 2)

    scores = torch.bmm(grouped.to(dtype), keys.to(dtype)).view(
        heads, queries, -1
    )  # from [Hk, G*T, N]
    weights, row_max = exp_scores(capped(scores * scale, softcap), bias, fmin)
    out = torch.bmm(weights.reshape(kv_heads, -1, key.shape[0]), values.to(dtype))
    row_max = row_max + nan_if_seen(bias > -math.inf, finite)
    return PartialAttention(
        out.view(heads, queries, -1).transpose(0, 1),
        row_max.transpose(0, 1),
        weights.sum(-1).transpose(0, 1),
    )


def exp_scores(scores: Tensor, bias: Tensor, fmin: float) -> tuple[Tensor, Tensor]:
    """Returns ``exp(scores + bias - max)`` over the last axis, and maxima of at least ``fmin``."""
    # `where` and not a plain sum, as NaN + -inf is NaN.
    biased = torch.where(bias > -math.inf, scores + bias.to(scores.dtype), -math.inf)
    row_max = biased.amax(-1).clamp_min(fmin)
    return torch.exp(biased - row_max.unsqueeze(-1)), row_max
