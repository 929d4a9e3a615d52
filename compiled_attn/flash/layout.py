"""Where the tokens of each batch row lie in the cache: the one place that knows pages from rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Layout"]


class Layout(NamedTuple):
    """Token t of row b lies in page ``table[b, t // page_size]`` at slot ``t % page_size``.

    A contiguous cache is a paged one: each of its rows is one page.

    Shape:
        - table: ``[B, W]`` int64, or None: row b is page b. A page that does not exist is never negative, since
          that would count from the end of the cache, but past its end, where looking it up fails.
        - totals: ``[B]`` ints, tokens of each row, the new ones and the left pad included
        - leftpad: ``[B]`` ints or None
    """

    table: Tensor | None
    page_size: int
    totals: Tensor
    leftpad: Tensor | None

    @classmethod
    def of(
        cls,
        k_cache: Tensor,
        totals: Tensor,
        leftpad: Tensor | None,
        cache_batch_idx: Tensor | None,
        block_table: Tensor | None,
    ) -> Layout:
        """The layout that the arguments of a call describe."""
        pages, page_size = k_cache.shape[:2]
        table = None if cache_batch_idx is None else cache_batch_idx.long().unsqueeze(1)
        if block_table is not None:
            table = (block_table if table is None else block_table[table[:, 0]]).long()
        table = None if table is None else torch.where(table < 0, pages, table)
        return cls(table, page_size, totals, leftpad)

    def place(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Page and slot of tokens ``[B, S]``, both int64 ``[B, S]``."""
        positions = positions.long()
        if self.table is None:
            rows = torch.arange(positions.shape[0], device=positions.device)
            return rows.unsqueeze(1).expand_as(positions), positions
        columns = positions.div(self.page_size, rounding_mode="floor")
        return self.table.gather(1, columns), positions - columns * self.page_size

    def read(self, cache: Tensor, start: int, end: int) -> Tensor:
        """Tokens ``start .. end - 1`` of every row, ``[B, end - start, Hk, D]``; arbitrary outside of its sequence."""
        if self.table is None:
            return cache[: self.totals.shape[0], start:end]
        first, last = start // self.page_size, -(-end // self.page_size)
        pages = self._used_pages(self.table[:, first:last], first)
        inside = slice(start - first * self.page_size, end - first * self.page_size)
        if last - first == 1:
            return cache[:, inside][pages[:, 0]]
        return cache[pages].flatten(1, 2)[:, inside]

    def _used_pages(self, table: Tensor, first: int) -> Tensor:
        # Entries that a row does not use may be anything, and are never looked up. A used one is not clamped.
        starts = torch.arange(first, first + table.shape[1], device=table.device) * self.page_size
        used = starts < self.totals.unsqueeze(1)
        if self.leftpad is not None:
            used = used & (starts + self.page_size > self.leftpad.unsqueeze(1))
        return torch.where(used, table, 0)
