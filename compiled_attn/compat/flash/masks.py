"""The masks and the ALiBi bias of `flash_attn_with_kvcache`.

Both count in cache slots. Query i of a row whose sequence ends before slot ``total`` stands at slot
``total - Sq + i`` (bottom-right alignment); a left pad shifts queries and keys alike, so it cancels
out.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["alibi", "query_slots", "slots_in_use", "visible"]


def query_slots(totals: Tensor, queries: int) -> Tensor:
    """The slot each query stands at, ``[B] -> [B, Sq]``; negative with fewer keys than queries."""
    return totals.unsqueeze(1) - queries + torch.arange(queries, device=totals.device)


def slots_in_use(slots: Tensor, totals: Tensor, leftpad: Tensor | None) -> Tensor:
    """Which slots ``[N]`` hold a token of each row's sequence, ``[B, N]``; others may hold NaN."""
    used = slots < totals.unsqueeze(1)
    return used if leftpad is None else used & (slots >= leftpad.unsqueeze(1))


def visible(slots: Tensor, used: Tensor, at: Tensor, window: tuple[int, int]) -> Tensor:
    """The slots ``[N]`` that each query sees, ``[B, Sq, N]``.

    Args:
        slots: ``[N]``.
        used: ``[B, N]``, of `slots_in_use`.
        at: ``[B, Sq]``, of `query_slots`.
        window: slots to the left and to the right of its own that a query sees; negative: all of
            them.
    """
    left, right = window
    seen = used.unsqueeze(1).expand(-1, at.shape[1], -1)
    if left >= 0:
        seen = seen & (slots >= at.unsqueeze(2) - left)
    if right >= 0:
        seen = seen & (slots <= at.unsqueeze(2) + right)
    return seen


def alibi(slopes: Tensor, slots: Tensor, at: Tensor) -> Tensor:
    """The bias ``-slope * distance``, ``[B, H, Sq, N]``, from slopes ``[H]`` or ``[B, H]``.

    Source: ALiBi (Press et al., 2022) in FlashAttention's symmetric form.
    """
    distance = (slots - at.unsqueeze(2)).abs().unsqueeze(1)  # [B, 1, Sq, N]
    return -slopes.view(-1, slopes.shape[-1], 1, 1) * distance
