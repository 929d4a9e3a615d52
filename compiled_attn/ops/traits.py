"""What decides which kernel can compute an attention, and the base class of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionTraits", "Implementation"]


@dataclass(frozen=True)
class AttentionTraits:
    """Properties of an attention that decide which kernels can serve it.

    Attributes:
        device: device type.
        dtype: dtype of the query.
        cache_dtypes: dtypes of keys and values.
        head_dim: elements of a query head; None: any.
        softcap: whether scores are capped.
        alibi: axes of the ALiBi slopes: 0 none, 1 heads, 2 rows and heads.
        window: visible tokens to the left and right of the query's own; negative: all.
        gradients: whether results are differentiated.
        by_request: whether there is per-request metadata: tables, lengths, first rows.
        by_parts: whether there is metadata of causal, shared and unique parts.
        unit_stride: whether the last axis of both caches is dense.
        left_pad: whether sequences are left-padded.
        layout: layout of the caches, see `compiled_attn.compat.paged.Layout`.
        partitions: whether results per partition are requested.
        sinks: whether there are attention sinks.
        value_dim: elements of a value head; None: any.
        page: tokens of a block; None: any.
    """

    device: str
    dtype: torch.dtype
    cache_dtypes: tuple[torch.dtype, torch.dtype]
    head_dim: int | None = None
    softcap: bool = False
    alibi: int = 0
    window: tuple[int, int] = (-1, 0)
    gradients: bool = False
    by_request: bool = True
    by_parts: bool = True
    unit_stride: bool = True
    left_pad: bool = False
    layout: str = "NHD"
    partitions: bool = False
    sinks: bool = False
    value_dim: int | None = None
    page: int | None = None


class Implementation:
    """A kernel that computes attention."""

    name: str

    def supports(self, traits: AttentionTraits) -> str | None:
        """Returns None if it computes such an attention where it is available, else the reason."""
        return None

    def unavailable(self, traits: AttentionTraits) -> str | None:
        """Returns why it is not available here for an attention it supports, or None."""
        return None
