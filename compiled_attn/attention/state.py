"""A part of an attention, not yet normalised, before the parts are merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FEPS", "FMIN", "Attend", "PartialAttention", "has_no_queries", "of_no_queries"]

FMIN = torch.finfo(torch.float32).min
"""Finite floor for row maxima: a row that sees nothing has this maximum, never -inf."""

FEPS = torch.finfo(torch.float32).tiny
"""Floor for the softmax denominator: a row that sees nothing divides 0 by this."""


class PartialAttention(NamedTuple):
    """Attention over some of the keys, not yet normalised.

    Shape:
        - out: ``[T, H, D]``, ``sum_j exp(s_j - max) * v_j``
        - max: ``[T, H]``, row maximum of the scores, at least ``fmin``; NaN in a row that saw a key
          or value that is not finite makes what the row is merged to NaN
        - sum: ``[T, H]``, ``sum_j exp(s_j - max)``; 0 where a row sees no key
    """

    out: Tensor
    max: Tensor
    sum: Tensor


def has_no_queries(query: Tensor) -> bool:
    """Whether a query ``[T, ...]`` has no token; where a compiler does not know, it has some."""
    if not torch.compiler.is_compiling():
        return query.shape[0] == 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # brings sympy

    return guard_or_false(query.shape[0] == 0)


def of_no_queries(query: Tensor, value: Tensor) -> PartialAttention:
    """The part of a step without tokens, which kernels cannot be asked for: some take maxima over
    no keys, or divide by the number of queries.

    Args:
        query: ``[0, H, D]``.
        value: ``[..., Dv]``.

    Returns:
        ``[0, H, Dv]`` and ``[0, H]``, in float32 (float64 for float64); gradients pass through.
    """
    rows = query.to(torch.promote_types(query.dtype, torch.float32)).sum(-1)
    return PartialAttention(rows.unsqueeze(-1).expand(-1, -1, value.shape[-1]), rows, rows)


Attend = Callable[..., PartialAttention]
"""The signature of `attend`, which faster kernels share. They keep keys and values that are NaN or
infinite from the queries that do not see them, whose bits do not change."""
