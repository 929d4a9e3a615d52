"""Keys and values that are NaN or infinite: they reach the rows that see them, and no other.

A weight of 0 hides nothing, since 0 * NaN and 0 * inf are NaN. So sums are taken over tokens that
are sound, and rows that see another are made NaN by what is added to them. Comparisons decide, not
arithmetic: inductor takes 0 * x for 0, and maxima of ONNX Runtime pass over NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["are_sound", "for_added_mask", "hurt", "only", "sum_of_parts"]

_LARGEST_KEY = 2.0**64
"""Keys from here on count as infinite where a score that a mask hides must be finite."""


def are_sound(rows: Tensor, largest: float = math.inf) -> Tensor:
    """Which tokens have elements below ``largest`` alone, and no NaN: ``[..., N, Hk, D] -> [...,
    N]`` bool.
    """
    return torch.where(rows.flatten(-2).abs() < largest, 0.0, 1.0).sum(-1) == 0


def only(sound: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[..., N, Hk, D]`` of tokens that are sound ``[..., N]``, and zeros for others."""
    return torch.where(sound[..., None, None], rows, 0)


def hurt(seen: Tensor, sound: Tensor) -> Tensor:
    """What a query gains from the keys it sees: 0 if all are sound, else NaN.

    Args:
        seen: ``[..., T, N]`` bool.
        sound: ``[..., N]`` bool.

    Returns:
        ``[..., T]`` float32.
    """
    return torch.where(seen & ~sound.unsqueeze(-2), math.nan, 0.0).sum(-1)


def for_added_mask(key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values for a kernel that hides scores by adding -inf, which leaves NaN as it is.

    Args:
        key, value: ``[..., N, Hk, D]``, D of each its own.
        seen: ``[..., T, N]`` bool.

    Returns:
        Keys and values with which every score is finite, and `hurt` of the queries.
    """
    sound = are_sound(key, _LARGEST_KEY) & are_sound(value)
    return only(sound, key), only(sound, value), hurt(seen, sound)


def sum_of_parts(uses: Tensor, parts: Tensor) -> Tensor:
    """Sums of the parts that each row uses; NaN where one of these is not finite.

    Args:
        uses: ``[R, n]`` bool.
        parts: ``[n, ...]``, float32 or float64.

    Returns:
        ``[R, ...]``.
    """
    # A reduction that told which parts are sound would be a pass over all of them, a fifth of the
    # time of decodes. This fuses: what is not finite is a large number, which 0 does hide, and
    # which no sum of others comes near.
    most = torch.finfo(parts.dtype).max
    marked = torch.where(parts.abs() < most * 2.0**-38, parts, most * 2.0**-8)
    sums = (uses.to(parts.dtype) @ marked.flatten(1)).unflatten(1, parts.shape[1:])
    return torch.where(sums.abs() < most * 2.0**-28, sums, math.nan)
