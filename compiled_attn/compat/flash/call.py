"""One call of `flash_attn_with_kvcache`: its arguments, and what follows from their shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_attn.attention.scoring import Scoring
from compiled_attn.ops import AttentionTraits, KernelChoice, unit_strides

__all__ = ["FlashCall"]


@dataclass(frozen=True)
class FlashCall:
    """The arguments of `flash_attn_with_kvcache`: the same names, order and defaults."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: Tensor | int | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    rotary_interleaved: bool = True
    alibi_slopes: Tensor | None = None
    num_splits: int = 0
    return_softmax_lse: bool = False
    kernel: KernelChoice = "auto"

    @property
    def new_tokens(self) -> int:
        """Sn."""
        return 0 if self.k is None else self.k.shape[1]

    @property
    def page_size(self) -> int:
        """P; a contiguous cache is a paged one: each of its rows is one page of Sc tokens."""
        return self.k_cache.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that a row of the batch can have in the cache: Sc, or W * P."""
        columns = 1 if self.block_table is None else self.block_table.shape[1]
        return self.page_size * columns

    @property
    def window(self) -> tuple[int, int]:
        """Tokens to the left and right that a query sees; negative: all."""
        left, right = self.window_size
        return (left, 0) if self.causal else (left, right)

    @property
    def scoring(self) -> Scoring:
        """How scores are made; its window is the left side of a causal one."""
        scale = self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        left = self.window[0]
        return Scoring(
            scale,
            window=left + 1 if left >= 0 else None,
            softcap=self.softcap if self.softcap > 0 else None,
            alibi_slopes=self.alibi_slopes,
        )

    @property
    def queries_turn(self) -> bool:
        """Whether query i is rotated as token ``L + i``; else all of them as token ``L``."""
        return max(self.window) >= 0

    def lengths(self) -> Tensor:
        """Tokens already in the cache, ``[B]``."""
        if isinstance(self.cache_seqlens, Tensor):
            return self.cache_seqlens
        length = self.capacity if self.cache_seqlens is None else self.cache_seqlens
        return torch.full((self.q.shape[0],), length, dtype=torch.int32, device=self.q.device)

    def traits(self) -> AttentionTraits:
        """What decides who can serve the call."""
        return AttentionTraits(
            self.q.device.type,
            self.q.dtype,
            (self.k_cache.dtype, self.v_cache.dtype),
            self.q.shape[-1],
            softcap=self.softcap > 0,
            alibi=0 if self.alibi_slopes is None else self.alibi_slopes.dim(),
            window=self.window,
            unit_stride=unit_strides(self.k_cache, self.v_cache),
            left_pad=self.cache_leftpad is not None,
        )
