"""Partial attention: unnormalised results that can be merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FEPS", "FMIN", "Attend", "PartialAttention", "has_no_queries", "of_no_queries"]

FMIN = torch.finfo(torch.float32).min
"""Finite floor of row maxima: the maximum of a row without visible keys."""

FEPS = torch.finfo(torch.float32).tiny
"""Floor of the softmax denominator: a row without visible keys divides 0 by this."""


class PartialAttention(NamedTuple):
    """Unnormalised attention over some of the keys.

    Shape:
        - out: ``[T, H, D]``, ``sum_j exp(s_j - max) * v_j``
        - max: ``[T, H]``, row maximum of the scores, at least ``fmin``; NaN for a row that sees a
          non-finite key or value, which makes the merged row NaN
        - sum: ``[T, H]``, ``sum_j exp(s_j - max)``; 0 if a row sees no key
    """

    out: Tensor
    max: Tensor
    sum: Tensor


def has_no_queries(query: Tensor) -> bool:
    """Whether a query ``[T, ...]`` has no token; False if a compiler does not know."""
    if not torch.compiler.is_compiling():
        return query.shape[0] == 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

    return guard_or_false(query.shape[0] == 0)


def of_no_queries(query: Tensor, value: Tensor) -> PartialAttention:
    """Returns the part of a step without tokens ``[0, H, Dv]``, which kernels do not support.

    Gradients pass through.
    """
    rows = query.to(torch.promote_types(query.dtype, torch.float32)).sum(-1)
    return PartialAttention(rows.unsqueeze(-1).expand(-1, -1, value.shape[-1]), rows, rows)


Attend = Callable[..., PartialAttention]
"""A function with the signature of `compiled_attn.attention.dense.attend`. NaN and infinity in keys
and values must not change a bit of queries that do not see them."""
