"""The pages of each batch row: the one place that knows where its tokens lie in the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.compat.flash.call import FlashCall

__all__ = ["PageTable"]


class PageTable(NamedTuple):
    """Token t of row b lies in page ``table[b, t // page_size]`` at slot ``t % page_size``.

    A contiguous cache is a paged one: each of its rows is one page.

    Shape:
        - table: ``[B, W]`` int64, or None: row b is page b; entries that a row does not use may be
          anything
        - totals: ``[B]`` ints, tokens of each row, the new ones and the left pad included
        - leftpad: ``[B]`` ints or None
    """

    table: Tensor | None
    page_size: int
    totals: Tensor
    leftpad: Tensor | None

    @classmethod
    def of(cls, call: FlashCall, lengths: Tensor) -> PageTable:
        """The table that the arguments of a call describe."""
        rows, table = call.cache_batch_idx, call.block_table
        if table is not None:
            table = table.long() if rows is None else table[rows].long()
        elif rows is not None:
            table = rows.long().unsqueeze(1)
        return cls(table, call.page_size, lengths + call.new_tokens, call.cache_leftpad)

    def without_null_rows(self) -> PageTable:
        """The same, but a row that lies in page 0 alone is all left pad: it sees nothing."""
        if self.table is None:
            return self
        leftpad = torch.zeros_like(self.totals) if self.leftpad is None else self.leftpad
        is_null = (self.table == 0).all(1)
        return self._replace(leftpad=torch.where(is_null, self.totals, leftpad))

    def place(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Page and slot of tokens ``[B, S]``, both int64 ``[B, S]``."""
        positions = positions.long()
        if self.table is None:
            rows = torch.arange(positions.shape[0], device=positions.device)
            return rows.unsqueeze(1).expand_as(positions), positions
        columns = positions.div(self.page_size, rounding_mode="floor")
        return self.table.gather(1, columns), positions - columns * self.page_size

    def read(self, cache: Tensor, start: int, end: int, used: Tensor) -> Tensor:
        """Tokens ``start .. end - 1`` of every row, ``[B, end - start, Hk, D]``.

        Zero where ``used [B, end - start]`` is False: what lies there may be NaN, and 0 * NaN is
        NaN.
        """
        tokens = self._gather(cache, start, end)
        if self.table is None or torch.compiler.is_compiling() or tokens.device.type != "cpu":
            return torch.where(used[:, :, None, None], tokens, 0)
        tokens[~used] = 0  # the gathered tokens are a copy, of which this touches only the unused
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
        # Entries that a row does not use may be anything, and are never looked up. A used one is
        # not clamped.
        starts = torch.arange(first, first + table.shape[1], device=table.device) * self.page_size
        used = starts < self.totals.unsqueeze(1)
        if self.leftpad is not None:
            used = used & (starts + self.page_size > self.leftpad.unsqueeze(1))
        return torch.where(used, table, 0)
