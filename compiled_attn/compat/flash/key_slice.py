"""Attention of a batch of rows over a slice of their keys, as a `PartialAttention`.

`attend_plain` is the reference; `attend_fused` is faster for the few queries of a decode step in a
compiled graph, `attend_sdpa` on the CPU. Each returns out ``[B, H, Sq, D]``, max and sum
``[B, H, Sq]``, in float32 for half precision inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.attention.nonfinite import are_finite, for_added_mask, nan_if_seen, zero_others
from compiled_attn.attention.state import FMIN, PartialAttention

__all__ = ["KeySlice", "attend_fused", "attend_plain", "attend_sdpa", "select_attend"]

Product = Callable[[Tensor, Tensor], Tensor]

_FEW_ROWS = 16
"""Maximum number of query rows per KV head for which `attend_fused` is faster."""


class KeySlice(NamedTuple):
    """The queries and a slice of the keys of each row of the batch.

    Shape:
        - query: ``[B, Sq, H, D]`` - key, value: ``[B, N, Hk, D]``; query head h reads key head ``h
        // (H // Hk)``. NaN and infinity reach the queries that see them; with a single query
        hidden tokens are finite
        - seen: ``[B, Sq, N]`` bool
        - bias: ``[B, H, Sq, N]`` or None, added after the cap
        - scale: factor of the scores
        - softcap: cap c of ``c * tanh(score / c)`` if positive
    """

    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    bias: Tensor | None
    scale: float
    softcap: float

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.query.shape[2] // self.key.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of scores, statistics and sums."""
        return torch.promote_types(self.query.dtype, torch.float32)

    def widened(self) -> KeySlice:
        """Converts to the dtype of the scores, as parts must not be rounded before the merge."""
        query, key, value = (each.to(self.dtype) for each in (self.query, self.key, self.value))
        return self._replace(query=query, key=key, value=value)

    @property
    def hides(self) -> bool:
        """Whether queries of a row may see different tokens."""
        return self.seen.shape[1] > 1

    def rows(self) -> Tensor:
        """Returns the queries by key head, ``[B, Hk, G * Sq, D]``."""
        by_head: Tensor = self.query.unflatten(2, (self.key.shape[2], self.group))
        return by_head.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def by_query_head(self, rows: Tensor) -> Tensor:
        """Reshapes ``[B, Hk, G * Sq, ...] -> [B, H, Sq, ...]``."""
        batch, queries, heads, _ = self.query.shape
        return rows.reshape(batch, heads, queries, *rows.shape[3:])


def select_attend(
    query: Tensor, kv_heads: int, softcap: float
) -> Callable[[KeySlice], PartialAttention]:
    """Selects the fastest implementation for these queries."""
    rows = query.shape[1] * (query.shape[2] // kv_heads)
    if torch.compiler.is_compiling() and rows <= _FEW_ROWS:
        return attend_fused
    on_cpu = query.device.type == "cpu" and softcap <= 0 and rows > 0
    if on_cpu and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return attend_sdpa
    return attend_plain


def attend_plain(s: KeySlice) -> PartialAttention:
    """Attends by two matmuls with the whole score matrix between them."""
    if not s.hides:
        return _attend(s, torch.matmul, torch.matmul)
    finite = are_finite(s.value)
    part = _attend(s._replace(value=zero_others(finite, s.value)), torch.matmul, torch.matmul)
    return _add_to_max(part, nan_if_seen(s.seen, finite))


def attend_fused(s: KeySlice) -> PartialAttention:
    """Attends by products and sums, which a compiler fuses with the gather of keys and values.

    A matmul would be a library call on a copy of the gathered cache.
    """

    def product(rows: Tensor, columns: Tensor) -> Tensor:
        return (rows.unsqueeze(-1) * columns.unsqueeze(2)).sum(-2)

    def product_of_seen(weights: Tensor, values: Tensor) -> Tensor:
        seen = s.seen.repeat(1, s.group, 1)[:, None, :, :, None]  # [B, 1, G * Sq, N, 1]
        return torch.where(seen, weights.unsqueeze(-1) * values.unsqueeze(2), 0).sum(-2)

    return _attend(s, product, product_of_seen if s.hides else product)


def attend_sdpa(s: KeySlice) -> PartialAttention:
    """Attends by torch's CPU flash attention, without softcap and without a score matrix."""
    if not s.hides:
        return _attend_sdpa(s)
    key, value, nan = for_added_mask(s.key, s.value, s.seen)
    return _add_to_max(_attend_sdpa(s._replace(key=key, value=value)), nan)


def _add_to_max(part: PartialAttention, nan: Tensor) -> PartialAttention:
    return part._replace(max=part.max + nan.unsqueeze(1))


def _attend_sdpa(s: KeySlice) -> PartialAttention:
    seen = s.seen.unsqueeze(1)
    mask = torch.where(seen, 0.0 if s.bias is None else s.bias, -math.inf).to(s.dtype)
    query = s.query.transpose(1, 2)
    if query.shape[2] * s.group <= _FEW_ROWS:  # read keys once per group of heads
        shape = query.shape[1] // s.group, s.group * query.shape[2]
        mask = mask.expand(-1, query.shape[1], -1, -1).reshape(-1, *shape, mask.shape[-1])
        query = s.rows()
    key, value = s.key.transpose(1, 2), s.value.transpose(1, 2)
    if query.stride(-1) != 1:  # the op ignores this stride
        query = query.contiguous()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=s.scale
    )
    # Without visible keys the op returns lse 0 instead of -inf, and NaN for a NaN query.
    sees = seen.any(-1).expand(-1, s.query.shape[2], -1)
    out = torch.where(sees.unsqueeze(-1), s.by_query_head(out).to(s.dtype), 0)
    row_max = torch.where(sees, s.by_query_head(lse), FMIN)
    return PartialAttention(out, row_max, sees.to(s.dtype))


def _attend(s: KeySlice, product: Product, weigh: Product) -> PartialAttention:
    rows = s.rows().to(s.dtype) * s.scale
    scores = s.by_query_head(product(rows, s.key.permute(0, 2, 3, 1).to(s.dtype)))
    if s.softcap > 0:
        scores = s.softcap * torch.tanh(scores / s.softcap)
    if s.bias is not None:
        scores = scores + s.bias
    scores = torch.where(s.seen.unsqueeze(1), scores, -math.inf)
    row_max = scores.amax(-1).clamp_min(FMIN)
    weights = torch.exp(scores - row_max.unsqueeze(-1))
    by_rows = weights.reshape(*rows.shape[:3], weights.shape[-1])
    out = weigh(by_rows, s.value.transpose(1, 2).to(s.dtype))
    return PartialAttention(s.by_query_head(out), row_max, weights.sum(-1))
