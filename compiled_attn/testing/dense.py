"""Dense attention in float64, and how a paged cache stores the rows that it attends to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "LARGEST",
    "attend",
    "dense",
    "distances",
    "position_bias",
    "read",
    "rotate",
    "store",
    "write",
]

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest number that an element of each quantised dtype can be."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Computes dense attention of one request.

    Scores are scaled, capped (``softcap * tanh(score / softcap)``), then the bias is added. A row
    that sees no key is zero.

    Shape:
        - query: ``[n, H, D]``; query head h reads KV head ``h // (H // Hk)``
        - key: ``[L, Hk, D]``
        - value: ``[L, Hk, Dv]``
        - bias: ``[H, n, L]`` or ``[n, L]``, -inf hides a key
        - sinks: ``[H]``, the score of an extra key without a value
        - returns: out ``[n, H, Dv]`` and the log-sum-exp ``[n, H]``, both in ``dtype``
    """
    group = query.shape[1] // key.shape[1]
    query, key, value = (each.to(dtype) for each in (query, key, value))
    key, value = (each.repeat_interleave(group, 1) for each in (key, value))
    scores = torch.einsum("nhd,lhd->hnl", query * scale, key)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias.to(dtype)
    if sinks is not None:
        sink = sinks.to(dtype)[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sink], -1)
    sees_nothing = scores.isneginf().all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(sees_nothing, 0)[..., : len(key)]
    return torch.einsum("hnl,lhd->nhd", weights, value), scores.logsumexp(-1).T


def distances(rows: int, length: int) -> Tensor:
    """Returns key position minus query position ``[rows, length]`` of a sequence's last rows."""
    return torch.arange(length) - torch.arange(length - rows, length).unsqueeze(1)


def position_bias(
    away: Tensor, left: int | None, right: int | None, slopes: Tensor | None = None
) -> Tensor:
    """Returns the bias of `distances`: keys visible to the left and right (None: all), ALiBi."""
    bias = torch.zeros(away.shape, dtype=torch.float64)
    if left is not None:
        bias = bias.masked_fill(away < -left, -math.inf)
    if right is not None:
        bias = bias.masked_fill(away > right, -math.inf)
    return bias if slopes is None else bias + slopes.double()[:, None, None] * away


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sliding_window: int | None = None,
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Computes causal attention of the last rows; ``options`` and results: see `attend`."""
    left = None if sliding_window is None else sliding_window - 1
    bias = position_bias(distances(len(query), len(key)), left, 0, alibi_slopes)
    return attend(query, key, value, bias, scale=query.shape[-1] ** -0.5, **options)


def store(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns rows ``[..., D]`` as a cache of that dtype stores them, their scales, and as read.

    Quantised dtypes have a scale for each row, which makes its largest element the largest of the
    dtype.
    """
    if dtype not in LARGEST:
        return rows.to(dtype), None, rows.to(dtype)
    scale = rows.float().abs().amax(-1) / LARGEST[dtype]
    scale = torch.where(scale == 0, 1.0, scale)  # zeros, in whatever scale
    scaled = rows.float() / scale[..., None]
    stored = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return stored, scale, stored.float() * scale[..., None]


def read(
    cache: Tensor, blocks: Sequence[int], start: int, end: int, scale: Tensor | None = None
) -> Tensor:
    """Returns tokens ``start .. end - 1`` of a request, ``[n, Hk, D]`` in float64.

    Args:
        cache: ``[num_blocks, block_size, Hk, D]``.
        blocks: those of the request in order.
        start, end: positions of the tokens.
        scale: ``[num_blocks, block_size, Hk]``, what stored elements are multiplied by.
    """
    at = [divmod(position, cache.shape[1]) for position in range(start, end)]
    if not at:
        return torch.zeros(0, *cache.shape[2:], dtype=torch.float64)
    cache = cache.cpu()
    rows = torch.stack([cache[blocks[column], slot] for column, slot in at]).double()
    if scale is None:
        return rows
    scale = scale.cpu()
    factors = torch.stack([scale[blocks[column], slot] for column, slot in at])
    return rows * factors.double().unsqueeze(-1)


def write(cache: Tensor, rows: Tensor, slots: Sequence[int], scale: Tensor | None = None) -> None:
    """Writes rows ``[n, Hk, D]`` to slots ``block * block_size + offset`` of a cache, see `read`;
    quantised as `store` does it."""
    stored, scales, _ = store(rows, cache.dtype)
    for row, slot in enumerate(slots):
        at = divmod(slot, cache.shape[1])
        cache[at] = stored[row]
        if scale is not None and scales is not None:
            scale[at] = scales[row]


def rotate(
    rows: Tensor, positions: Sequence[int], cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """Rotates rows ``[n, h, D]`` by their positions in the tables ``[R, rotary / 2]``.

    The pairs are elements (0, 1), (2, 3) .. if interleaved, else (i, i + rotary / 2).
    """
    rows, half = rows.double().cpu().clone(), cos.shape[1]
    for pair in range(half):
        one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        c, s = (table[positions, pair].double().cpu().unsqueeze(1) for table in (cos, sin))
        x, y = rows[..., one].clone(), rows[..., two].clone()
        rows[..., one], rows[..., two] = x * c - y * s, x * s + y * c
    return rows
