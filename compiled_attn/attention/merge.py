"""Merges partial attentions exactly, in any grouping."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.attention.nonfinite import sum_of_parts
from compiled_attn.attention.state import FEPS, PartialAttention

__all__ = ["lse", "merge", "merge_online", "reduce_to_rows"]


def merge(*parts: PartialAttention | None, feps: float = FEPS) -> Tensor:
    """Returns normalised attention over the keys of all parts, ``[T, H, D]``; zeros without keys.

    Raises:
        ValueError: every part is None.
    """
    present = _present(parts)
    row_max = _common_max(present)
    out, total = torch.zeros_like(present[0].out), torch.zeros_like(row_max)
    for part in present:
        factor = torch.exp(part.max - row_max)
        out = out + part.out * factor.unsqueeze(-1)
        total = total + part.sum * factor
    return out / total.clamp_min(feps).unsqueeze(-1)


def merge_online(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Merges two parts to one, for long rows of chunks."""
    row_max = torch.maximum(first.max, second.max)
    old, new = torch.exp(first.max - row_max), torch.exp(second.max - row_max)
    out = first.out * old.unsqueeze(-1) + second.out * new.unsqueeze(-1)
    return PartialAttention(out, row_max, first.sum * old + second.sum * new)


def lse(*parts: PartialAttention | None) -> Tensor:
    """Returns the natural log-sum-exp of scores over all parts, ``[T, H]``; -inf without keys.

    Raises:
        ValueError: every part is None.
    """
    present = _present(parts)
    row_max = _common_max(present)
    total = torch.zeros_like(row_max)
    for part in present:
        total = total + part.sum * torch.exp(part.max - row_max)
    return row_max + torch.log(total)


def reduce_to_rows(parts: PartialAttention, owner: Tensor, rows: Tensor) -> PartialAttention:
    """Merges n parts ``[n, H, ...]`` to rows: part i belongs to row ``owner[i]``."""
    # A one-hot comparison: unlike scatter and index_add it fuses, sums in a fixed order, and never
    # uses `owner` as an index.
    uses = rows.unsqueeze(1) == owner  # [R, n]
    floor = torch.finfo(parts.max.dtype).min
    row_max = torch.where(uses.unsqueeze(-1), parts.max, floor).amax(1)
    own_max = torch.where(uses.unsqueeze(-1), row_max.unsqueeze(1), floor).amax(0)  # exact
    # The clamp is for parts without a row, whose weight is 0 below: 0 * exp(large) would be NaN.
    factor = torch.exp((parts.max - own_max).clamp_max(0))
    out = sum_of_parts(uses, parts.out * factor.unsqueeze(-1))
    return PartialAttention(out, row_max, sum_of_parts(uses, parts.sum * factor))


def _present(parts: tuple[PartialAttention | None, ...]) -> list[PartialAttention]:
    present = [part for part in parts if part is not None]
    if not present:
        raise ValueError(
            "expected at least one part of the attention, got none: "
            "give the step a causal bias, shared blocks or unique blocks"
        )
    return present


def _common_max(parts: list[PartialAttention]) -> Tensor:
    row_max = parts[0].max
    for part in parts[1:]:
        row_max = torch.maximum(row_max, part.max)
    return row_max
