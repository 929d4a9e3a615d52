"""Scores of keys: scale, softcap, ALiBi, sliding window, attention sinks."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

__all__ = ["Scoring", "by_position", "capped", "check_window"]


@dataclass(frozen=True)
class Scoring:
    """Parameters of scores: scale, softcap, ALiBi and window are applied in this order.

    Attributes:
        scale: factor of the scores.
        window: number of visible tokens including itself; None: all before it.
        softcap: cap c of ``c * tanh(score / c)``, or None.
        alibi_slopes: ``[H]``; a score gains ``slope * (key position - query position)``.
        sinks: ``[H]``, score of an extra key of each head with value zero.

    Source: ALiBi of Press et al. (2022); sinks as in gpt-oss; windows as in Mistral.
    """

    scale: float
    _: KW_ONLY
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    def slopes_for(self, query: Tensor) -> Tensor | None:
        """Returns the slopes in the dtype of a query, or in their own if it is wider."""
        if self.alibi_slopes is None:
            return None
        return self.alibi_slopes.to(torch.promote_types(self.alibi_slopes.dtype, query.dtype))


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Applies a logit softcap, ``softcap * tanh(scores / softcap)``; None: no softcap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def by_position(
    bias: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    window: int | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Hides keys outside the window in a bias ``[T, N]`` or ``[H, T, N]``, and adds ALiBi.

    ``query_positions [T]``; ``key_positions [N]``, or ``[T, N]`` if each query has its own keys.
    """
    distance = query_positions.unsqueeze(-1) - key_positions  # [T, N]
    if window is not None:
        bias = torch.where(distance >= window, -math.inf, bias)
    if alibi_slopes is not None:
        # Half precision cannot represent most distances.
        slopes = alibi_slopes.to(torch.promote_types(alibi_slopes.dtype, torch.float32))
        bias = bias - slopes.view(-1, 1, 1) * distance
    return bias


def check_window(window: int | None) -> None:
    """Raises ValueError unless a window is None or at least one token."""
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window: expected at least 1 token, got {window}: None is no window"
        )
