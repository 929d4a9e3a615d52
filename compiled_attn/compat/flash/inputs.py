"""The arguments of one call of `flash_attn_with_kvcache`, and the pages of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.attention.rotary import apply_rotary
from compiled_attn.attention.scoring import Scoring
from compiled_attn.ops import AttentionTraits, KernelChoice, unit_strides

__all__ = ["FlashCall", "PageTable"]


@dataclass(frozen=True)
class FlashCall:
    """The arguments of `flash_attn_with_kvcache`, with the same names, order and defaults."""

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
        """Number of new tokens of each row."""
        return 0 if self.k is None else self.k.shape[1]

    @property
    def page_size(self) -> int:
        """P; each row of a contiguous cache is one page of Sc tokens."""
        return self.k_cache.shape[1]

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a batch row: Sc, or W * P."""
        columns = 1 if self.block_table is None else self.block_table.shape[1]
        return self.page_size * columns

    @property
    def window(self) -> tuple[int, int]:
        """Visible tokens to the left and right of a query; negative: all."""
        left, right = self.window_size
        return (left, 0) if self.causal else (left, right)

    @property
    def scoring(self) -> Scoring:
        """Scale, window (the left side of a causal one), softcap and slopes."""
        scale = self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        left = self.window[0]
        return Scoring(
            scale,
            window=left + 1 if left >= 0 else None,
            softcap=self.softcap if self.softcap > 0 else None,
            alibi_slopes=self.alibi_slopes,
        )

    @property
    def rotates_by_position(self) -> bool:
        """Whether query i is rotated as token ``L + i``; else all queries as token ``L``."""
        return max(self.window) >= 0

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates heads ``[..., S, h, D]`` by their positions ``[..., S]``, if the call rotates."""
        if self.rotary_cos is None or self.rotary_sin is None:
            return x
        tables, interleaved = (self.rotary_cos, self.rotary_sin), self.rotary_interleaved
        return apply_rotary(x, *tables, positions, interleaved=interleaved)

    def lengths(self) -> Tensor:
        """Number of tokens already in the cache, ``[B]``."""
        if isinstance(self.cache_seqlens, Tensor):
            return self.cache_seqlens
        length = self.capacity if self.cache_seqlens is None else self.cache_seqlens
        return torch.full((self.q.shape[0],), length, dtype=torch.int32, device=self.q.device)

    def traits(self) -> AttentionTraits:
        """Properties that determine which kernels can serve the call."""
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


class PageTable(NamedTuple):
    """Token t of row b is in page ``table[b, t // page_size]`` at slot ``t % page_size``.

    Shape:
        - table: ``[B, W]`` int64; entries that a row does not use may be anything. None: row b is
          page b
        - totals: ``[B]`` ints, tokens of each row including new ones and the left pad
        - leftpad: ``[B]`` ints or None
    """

    table: Tensor | None
    page_size: int
    totals: Tensor
    leftpad: Tensor | None

    @classmethod
    def of(cls, call: FlashCall, lengths: Tensor) -> PageTable:
        """Builds the table from the arguments of a call."""
        rows, table = call.cache_batch_idx, call.block_table
        if table is not None:
            table = table.long() if rows is None else table[rows].long()
        elif rows is not None:
            table = rows.long().unsqueeze(1)
        return cls(table, call.page_size, lengths + call.new_tokens, call.cache_leftpad)

    def without_null_rows(self) -> PageTable:
        """Makes rows that are in page 0 only all left pad, so that they see nothing."""
        if self.table is None:
            return self
        leftpad = torch.zeros_like(self.totals) if self.leftpad is None else self.leftpad
        is_null = (self.table == 0).all(1)
        return self._replace(leftpad=torch.where(is_null, self.totals, leftpad))

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns page and slot of tokens ``[B, S]``, both int64 ``[B, S]``."""
        positions = positions.long()
        if self.table is None:
            rows = torch.arange(positions.shape[0], device=positions.device)
            return rows.unsqueeze(1).expand_as(positions), positions
        columns = positions.div(self.page_size, rounding_mode="floor")
        return self.table.gather(1, columns), positions - columns * self.page_size

    def read(self, cache: Tensor, start: int, end: int, used: Tensor) -> Tensor:
        """Reads tokens ``start .. end - 1`` of every row, ``[B, end - start, Hk, D]``.

        Zero if ``used [B, end - start]`` is False: such slots may hold NaN, and 0 * NaN is NaN.
        """
        tokens = self._gather(cache, start, end)
        if self.table is None or torch.compiler.is_compiling() or tokens.device.type != "cpu":
            return torch.where(used[:, :, None, None], tokens, 0)
        tokens[~used] = 0  # in place, as the gathered tokens are a copy
        return tokens

    def _gather(self, cache: Tensor, start: int, end: int) -> Tensor:
        if self.table is None:
            return cache[: self.totals.shape[0], start:end]
        first, last = start // self.page_size, -(-end // self.page_size)
        pages = self._used_pages(self.table[:, first:last], first)
        inside = slice(start - first * self.page_size, end - first * self.page_size)
        if last - first == 1:
            return cache[:, inside][pages[:, 0]]
        return cache[pages].flatten(1, 2)[:, inside]

    def _used_pages(self, table: Tensor, first: int) -> Tensor:
        # Unused entries may be anything and are never looked up. Used ones are not clamped.
        starts = torch.arange(first, first + table.shape[1], device=table.device) * self.page_size
        used = starts < self.totals.unsqueeze(1)
        if self.leftpad is not None:
            used = used & (starts + self.page_size > self.leftpad.unsqueeze(1))
        return torch.where(used, table, 0)
