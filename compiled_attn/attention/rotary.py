"""Rotary position embedding with tables of cosines and sines (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rotary"]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = True,
) -> Tensor:
    """Rotates the first ``rd`` elements of every head by the position of its token.

    A pair ``(x1, x2)`` becomes ``(x1 * cos - x2 * sin, x1 * sin + x2 * cos)``, in float32 for half
    precision inputs and rounded once; other elements are unchanged.

    Args:
        x: ``[..., S, H, D]``, not modified.
        cos, sin: ``[R, rd / 2]``, a row per position.
        positions: ints ``[..., S]`` in ``0 .. R - 1``, the row of each token; None: ``0 .. S - 1``.
        interleaved: True pairs (0, 1), (2, 3), .. as in GPT-J; False pairs (i, i + rd / 2) as in
            GPT-NeoX and Llama.

    Returns:
        ``[..., S, H, D]`` in x's dtype.

    Raises:
        ValueError: shapes do not match.
    """
    half = cos.shape[-1]
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * half > x.shape[-1]:
        raise ValueError(
            "expected cos and sin of one shape [R, rd / 2] with rd <= D, got "
            f"{list(cos.shape)} and {list(sin.shape)} for x {list(x.shape)}: cut the tables"
        )
    if positions is None:
        positions = torch.arange(x.shape[-3], device=x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions].unsqueeze(-2).to(dtype) for table in (cos, sin))  # [..., S, 1, rd / 2]
    pairs = x[..., : 2 * half].to(dtype).unflatten(-1, (half, 2) if interleaved else (2, half))
    x1, x2 = pairs.unbind(-1 if interleaved else -2)
    rotated = torch.stack((x1 * c - x2 * s, x1 * s + x2 * c), -1 if interleaved else -2)
    return torch.cat((rotated.flatten(-2).to(x.dtype), x[..., 2 * half :]), -1)
