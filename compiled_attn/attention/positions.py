"""What the distance of a key from its query adds to a bias: sliding windows and ALiBi."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["by_position", "check_window"]


def by_position(
    bias: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    window: int | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """A bias with keys outside the window hidden, and lowered by slope times distance.

    Args:
        bias: ``[T, N]`` or ``[H, T, N]``.
        query_positions: ``[T]`` ints.
        key_positions: ``[N]``, or ``[T, N]`` where each query has keys of its own.
        window: see `UnifiedMetadata.seen_from`.
        alibi_slopes: ``[H]``, or None.

    Returns:
        The new bias; with slopes it has an axis of heads: ``[H, T, N]``.
    """
    distance = query_positions.unsqueeze(-1) - key_positions  # [T, N]
    if window is not None:
        bias = torch.where(distance >= window, -math.inf, bias)
    if alibi_slopes is not None:
        # Half precision has no number for most distances: slopes of it are widened first.
        slopes = alibi_slopes.to(torch.promote_types(alibi_slopes.dtype, torch.float32))
        # Padding may stand anywhere: where it is hidden, -inf - x is still -inf.
        bias = bias - slopes.view(-1, 1, 1) * distance
    return bias


def check_window(window: int | None) -> None:
    """Raises ValueError unless a window is None or at least one token."""
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window: expected at least 1 token, got {window}: None is no window"
        )
