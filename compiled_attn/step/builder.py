"""Builds planned steps from requests, or from rows of a persistent table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.step.parts import StepBatch, StepPlan
from compiled_attn.step.parts_layout import PartsLayout
from compiled_attn.step.requests import Ints, Request, RequestTable, StepRows, block_ids, check_ids
from compiled_attn.step.tables import TableLayout, TablePlan

__all__ = ["BatchBuilder"]


class BatchBuilder:
    """Builds steps over a paged cache.

    Every step gets new tensors, except for tables that a `RequestTable` lets it read in place.

    Args:
        num_blocks: blocks of the cache, null block 0 included.
        window: tokens that a token sees, itself included, where all layers have a sliding window:
            blocks before it may be null. None: all blocks are read.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"expected num_blocks >= 2 and block_size >= 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._window = window
        self._parts = PartsLayout(num_blocks, block_size)
        self._tables = TableLayout(num_blocks, block_size)
        # Scratch of the size of the cache, written and read only where a step has slots.
        self._last_writer = np.zeros(num_blocks * block_size, np.int64)

    def need(self, requests: Sequence[Request]) -> dict[str, int]:
        """Returns the sizes that a step needs: ``tokens``, ``shared``, ``unique``, ``logits``."""
        return self.plan(requests).need

    def build(
        self, requests: Sequence[Request], bucket: Mapping[str, int] | None = None
    ) -> StepBatch:
        """Builds the step, padded to a bucket (None: to exactly what it needs).

        A bucket may also carry the axis ``causal``: 0 leaves the causal part out.

        Raises:
            ValueError: a request that does not fit the cache or its block table, two requests that
                write the same slot, or a bucket that is too small.
        """
        return self.plan(requests).fill(bucket)

    def plan(self, requests: Sequence[Request]) -> StepPlan:
        """Plans the step in parts: its ``need`` picks the bucket that ``fill`` pads it to.

        Raises:
            ValueError: see `build`.
        """
        return self._parts.plan(self.rows_of(requests))

    def plan_tables(self, requests: Sequence[Request]) -> TablePlan:
        """Plans the step in tables, for the op: its need is tokens and requests.

        Raises:
            ValueError: see `build`.
        """
        return self._tables.plan(self.rows_of(requests))

    def plan_rows(
        self,
        table: RequestTable,
        rows: Sequence[int] | Ints,
        context: Sequence[int] | Ints,
        query: Sequence[int] | Ints,
        tokens: Sequence[int] | Ints,
        logits: Sequence[int] | Ints | None = None,
        is_prefill: Sequence[bool] | NDArray[np.bool_] | None = None,
    ) -> StepPlan:
        """Plans the step in parts from rows of a `RequestTable`, see `rows`."""
        return self._parts.plan(self.rows(table, rows, context, query, tokens, logits, is_prefill))

    def rows(
        self,
        table: RequestTable,
        rows: Sequence[int] | Ints,
        context: Sequence[int] | Ints,
        query: Sequence[int] | Ints,
        tokens: Sequence[int] | Ints,
        logits: Sequence[int] | Ints | None = None,
        is_prefill: Sequence[bool] | NDArray[np.bool_] | None = None,
    ) -> StepRows:
        """Collects a step from rows of a `RequestTable`, without Python work per request or block.

        The step reads the table until it is filled: rows may grow meanwhile, but not be given to
        other requests.

        Args:
            table: block tables, which are updated by the caller.
            rows: ``[R]`` rows of the step's requests, in order.
            context: ``[R]`` tokens in the cache before this step.
            query: ``[R]`` new tokens.
            tokens: ``[sum(query)]`` their ids, requests in order.
            logits: ``[R]`` last tokens that need logits; None: one each.
            is_prefill: ``[R]`` which are still in their prompt; None: those with several new tokens
                or without context.

        Raises:
            ValueError: see `build`.
        """
        # Copies: the caller may change its arrays before the plan is filled.
        at, before, new = (np.array(each, np.int64) for each in (rows, context, query))
        if not len(at):
            raise ValueError("expected at least one request in a step, got none")
        num_logits = np.ones(len(at), np.int64) if logits is None else np.array(logits, np.int64)
        prefill = (new > 1) | (before == 0) if is_prefill is None else np.array(is_prefill, bool)
        _check_sizes(at, before, new, num_logits, prefill)
        return self._rows(
            table.blocks.reshape(-1),
            at * table.blocks.shape[1],
            table.lengths[at],
            before,
            new,
            num_logits,
            prefill,
            np.array(tokens, np.int64),
            table.state_slots[at],
            table.in_place(at, self.num_blocks),
        )

    def rows_of(self, requests: Sequence[Request]) -> StepRows:
        """Collects a step from requests, for a layout to plan."""
        if not requests:
            raise ValueError("expected at least one request in a step, got none")
        tables = [np.asarray(request.block_table, np.int64) for request in requests]
        held = np.array([len(table) for table in tables], np.int64)
        longest = np.zeros(held.max(initial=0), np.int64)
        return self._rows(
            block_ids(np.concatenate([*tables, longest])),
            np.cumsum(held) - held,
            held,
            np.array([request.context_len for request in requests], np.int64),
            np.array([len(request.tokens) for request in requests], np.int64),
            np.array([request.num_logits for request in requests], np.int64),
            np.array([request.is_prefill for request in requests], np.bool_),
            np.concatenate([np.asarray(request.tokens, np.int64) for request in requests]),
            np.array([request.state_slot for request in requests], np.int64),
        )

    def _rows(
        self,
        blocks: NDArray[np.int32],
        base: Ints,
        held: Ints,
        context: Ints,
        query: Ints,
        logits: Ints,
        is_prefill: NDArray[np.bool_],
        tokens: Ints,
        state_slots: Ints,
        in_place: NDArray[np.int32] | None = None,
    ) -> StepRows:
        _check_lengths(held * self.block_size, context, query, logits, len(tokens))
        first = np.cumsum(query) - query
        positions = np.repeat(context - first, query) + np.arange(len(tokens))
        number, offset = np.divmod(positions, self.block_size)
        written = blocks[np.repeat(base, query) + number].astype(np.int64)
        check_ids(written, self.num_blocks)
        slots = written * self.block_size + offset
        self._check_slots(slots)
        unread = None
        if self._window is not None:
            unread = np.maximum(context - self._window + 1, 0) // self.block_size
        return StepRows(
            blocks,
            base,
            held,
            context,
            query,
            logits,
            is_prefill,
            first,
            tokens,
            positions,
            slots,
            state_slots,
            in_place,
            unread,
        )

    def _check_slots(self, slots: Ints) -> None:
        order = np.arange(len(slots))
        self._last_writer[slots] = order
        if (self._last_writer[slots] != order).any():
            raise ValueError(
                "expected a different slot for every new token of a step, got two with one slot: "
                "requests that share a block must copy it before they write to it"
            )


def _check_lengths(room: Ints, context: Ints, query: Ints, logits: Ints, tokens: int) -> None:
    bad = (query < 1) | (context < 0) | (context + query > room)
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(
            f"request {at}: expected query_len >= 1, context_len >= 0 and enough blocks, "
            f"got query_len {query[at]}, context_len {context[at]}, room for {room[at]}: "
            "reserve its blocks first"
        )
    if ((logits < 0) | (logits > query)).any():
        raise ValueError("expected num_logits between 0 and query_len of its request")
    if int(query.sum()) != tokens:
        raise ValueError(f"expected {query.sum()} tokens (the sum of query), got {tokens}")


def _check_sizes(rows: Ints, *others: NDArray[Any]) -> None:
    sizes = [len(each) for each in others]
    if any(size != len(rows) for size in sizes):
        raise ValueError(
            f"expected context, query, logits and is_prefill of {len(rows)} rows, got {sizes}: "
            "list every request in each"
        )
