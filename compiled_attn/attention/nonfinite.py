"""Keys and values that are NaN or infinite: they affect the rows that see them, and no other.

A weight of 0 hides nothing, since 0 * NaN and 0 * inf are NaN. So sums run over finite tokens, and
NaN is added to rows that see another token. Comparisons are used instead of arithmetic: inductor
simplifies 0 * x to 0, and maxima of ONNX Runtime ignore NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["are_finite", "for_added_mask", "nan_if_seen", "sum_of_parts", "zero_others"]

_LARGEST_KEY = 2.0**64
"""Larger keys count as infinite if scores hidden by a mask must be finite."""


def are_finite(rows: Tensor, largest: float = math.inf) -> Tensor:
    """Whether all elements of ``[..., N, Hk, D]`` are below ``largest``, ``[..., N]`` bool."""
    return torch.where(rows.flatten(-2).abs() < largest, 0.0, 1.0).sum(-1) == 0


def zero_others(finite: Tensor, rows: Tensor) -> Tensor:
    """Replaces rows ``[..., N, Hk, D]`` by zeros unless they are finite ``[..., N]``."""
    return torch.where(finite[..., None, None], rows, 0)


def nan_if_seen(seen: Tensor, finite: Tensor) -> Tensor:
    """Returns 0 for queries whose ``seen [..., T, N]`` are all ``finite [..., N]``, else NaN.

    ``[..., T]`` float32, to be added to what belongs to a query.
    """
    return torch.where(seen & ~finite.unsqueeze(-2), math.nan, 0.0).sum(-1)


def for_added_mask(key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Prepares keys and values for a kernel that masks by adding -inf, which does not hide NaN.

    Returns keys and values ``[..., N, Hk, D]`` with which every score is finite, and what to add
    to the queries, see `nan_if_seen`.
    """
    finite = are_finite(key, _LARGEST_KEY) & are_finite(value)
    return zero_others(finite, key), zero_others(finite, value), nan_if_seen(seen, finite)


def sum_of_parts(uses: Tensor, parts: Tensor) -> Tensor:
    """Returns sums ``[R, ...]`` of the parts ``[n, ...]`` that each row ``uses [R, n]``.

    NaN if one of them is not finite.
    """
    # A reduction that finds finite parts would read all of them once more, a fifth of the time of
    # decodes. This fuses: non-finite parts become a large number, which a weight of 0 does hide,
    # and which no sum of others comes near.
    most = torch.finfo(parts.dtype).max
    marked = torch.where(parts.abs() < most * 2.0**-38, parts, most * 2.0**-8)
    sums = (uses.to(parts.dtype) @ marked.flatten(1)).unflatten(1, parts.shape[1:])
    return torch.where(sums.abs() < most * 2.0**-28, sums, math.nan)
