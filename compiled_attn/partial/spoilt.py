"""Keys and values that are NaN or infinite: they reach the rows that see them, and no other.

A weight of 0 hides nothing, since 0 * NaN and 0 * inf are NaN. So sums are taken over what is
finite, and rows that see something else are made NaN by what `spoilt` gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["finite", "seen_spoilt", "spoilt"]


def finite(rows: Tensor) -> Tensor:
    """The same with 0 for every element that is NaN or infinite."""
    return torch.where(rows * 0 == 0, rows, 0)


def spoilt(rows: Tensor) -> Tensor:
    """0 for a row of finite elements, NaN for any other: ``[..., D] -> [...]``."""
    return (rows.detach() * 0).sum(-1)


def seen_spoilt(seen: Tensor, keys: Tensor) -> Tensor:
    """0 for a query that sees no spoilt key, else NaN: ``[..., T, N], [..., N] -> [..., T]``.

    Args:
        seen: bool.
        keys: 0 or NaN, see `spoilt`.
    """
    return torch.where(seen, keys.unsqueeze(-2), 0).sum(-1)
