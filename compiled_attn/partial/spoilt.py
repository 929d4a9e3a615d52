"""Keys and values that are NaN or infinite: they reach the rows that see them, and no other.

A weight of 0 hides nothing, since 0 * NaN and 0 * inf are NaN. So sums are taken over what is
finite, and the maxima of rows that see something else are made NaN; whatever they are merged with
is then NaN too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["finite", "for_added_mask", "seen_spoilt", "spoilt"]

_ROOM = 2.0**64
"""Keys that overflow when multiplied by this count as infinite: a product with them might be."""


def finite(rows: Tensor) -> Tensor:
    """The same with 0 for every element that is NaN or infinite."""
    return torch.where(rows.isfinite(), rows, 0)


def spoilt(rows: Tensor) -> Tensor:
    """0 for a row of finite elements, NaN for any other: ``[..., D] -> [...]``."""
    # Not a sum of 0 * x, which would be the same: inductor takes 0 * x for 0.
    return torch.where(rows.isfinite().all(-1), 0.0, math.nan)


def seen_spoilt(seen: Tensor, keys: Tensor) -> Tensor:
    """0 for a query that sees no spoilt key, else NaN: ``[..., T, N], [..., N] -> [..., T]``.

    Args:
        seen: bool.
        keys: 0 or NaN, see `spoilt`.
    """
    return torch.where(seen, keys.unsqueeze(-2), 0).sum(-1)


def for_added_mask(key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values for a kernel that hides by adding -inf, where NaN and inf would stay NaN.

    Args:
        key, value: ``[..., N, Hk, D]``, D of each its own.
        seen: ``[..., T, N]`` bool.

    Returns:
        Keys and values, all scores with which are finite, and what the maxima of the rows ``[...,
        T]`` gain: 0, or NaN for a row that sees a key or value that was NaN, infinite, or (a key)
        too large.
    """
    wide = key.to(torch.promote_types(key.dtype, torch.float32)) * _ROOM
    hurt = seen_spoilt(seen, spoilt(wide.flatten(-2)) + spoilt(value.flatten(-2)))
    return torch.where(wide.isfinite(), key, 0), finite(value), hurt
