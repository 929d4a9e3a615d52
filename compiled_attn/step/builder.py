"""From requests to a planned step: which cached blocks are read, and by how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.step.parts import StepBatch
from compiled_attn.step.plan import BlockEntries, StepPlan, StepRows
from compiled_attn.step.requests import Ints, Request, RequestTable
from compiled_attn.step.tables import TablePlan

__all__ = ["BatchBuilder"]


class BatchBuilder:
    """Builds steps over a paged cache.

    Every step gets tensors of its own: building the next one never changes those handed out before.

    Args:
        num_blocks: blocks of the cache, null block 0 included.
        block_size: slots in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"expected num_blocks >= 2 and block_size >= 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Scratch of the size of the pool, written and read only where a step has entries.
        self._last_entry = np.zeros(num_blocks, np.int64)
        self._last_writer = np.zeros(num_blocks * block_size, np.int64)
        self._is_repeated = np.zeros(num_blocks, np.bool_)

    def need(self, requests: Sequence[Request]) -> dict[str, int]:
        """Sizes that the step needs: ``tokens``, ``shared``, ``unique``, ``logits``."""
        return self.plan(requests).need

    def build(
        self, requests: Sequence[Request], bucket: Mapping[str, int] | None = None
    ) -> StepBatch:
        """The step padded to a bucket (None: to exactly what it needs).

        A bucket may also carry the axis ``causal``: 0 leaves the causal part out.

        Raises:
            ValueError: a request that does not fit the cache or its block table, two requests that
                write the same slot, or a bucket that is too small; nothing is built.
        """
        return self.plan(requests).fill(bucket)

    def plan(self, requests: Sequence[Request]) -> StepPlan:
        """The step before padding; its ``need`` picks the bucket that ``fill`` pads it to.

        Raises:
            ValueError: see `build`.
        """
        rows, entries = self._rows(*self._arrays(requests))
        return self._plan(rows, entries)

    def plan_tables(self, requests: Sequence[Request]) -> TablePlan:
        """The step request by request, for the native kernel: its need is tokens and requests.

        Raises:
            ValueError: see `build`.
        """
        rows, _ = self._rows(*self._arrays(requests))
        return TablePlan(rows, self.block_size)

    def _arrays(self, requests: Sequence[Request]) -> tuple[Any, ...]:
        if not requests:
            raise ValueError("expected at least one request in a step, got none")
        tables = [np.asarray(request.block_table, np.int64) for request in requests]
        held = np.array([len(table) for table in tables], np.int64)
        return (
            np.concatenate(tables),
            np.cumsum(held) - held,
            held,
            np.array([request.context_len for request in requests], np.int64),
            np.array([len(request.tokens) for request in requests], np.int64),
            np.array([request.num_logits for request in requests], np.int64),
            np.array([request.is_prefill for request in requests], np.bool_),
            np.concatenate([np.asarray(request.tokens, np.int64) for request in requests]),
        )

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
        """`plan` for rows of a `RequestTable`: no Python work per request or block.

        The plan looks at the table until it is filled: rows may grow meanwhile, but not be given to
        other requests.

        Args:
            table: block tables, kept up to date by the caller.
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
        # Copies: the caller may count on in its arrays before the plan is filled.
        at, before, new = (np.array(each, np.int64) for each in (rows, context, query))
        if not len(at):
            raise ValueError("expected at least one request in a step, got none")
        wanted = np.ones(len(at), np.int64) if logits is None else np.array(logits, np.int64)
        prefill = (new > 1) | (before == 0) if is_prefill is None else np.array(is_prefill, bool)
        _check_sizes(at, before, new, wanted, prefill)
        planned, entries = self._rows(
            table.blocks.reshape(-1),
            at * table.blocks.shape[1],
            table.lengths[at],
            before,
            new,
            wanted,
            prefill,
            np.array(tokens, np.int64),
        )
        return self._plan(planned, entries)

    def _rows(
        self,
        blocks: Ints,
        base: Ints,
        held: Ints,
        context: Ints,
        query: Ints,
        logits: Ints,
        is_prefill: NDArray[np.bool_],
        tokens: Ints,
    ) -> tuple[StepRows, BlockEntries]:
        """The checked step, and the blocks it reads."""
        self._check_lengths(held, context, query, logits, len(tokens))
        first = np.cumsum(query) - query
        positions = np.repeat(context - first, query) + np.arange(len(tokens))
        number, offset = np.divmod(positions, self.block_size)
        slots = blocks[np.repeat(base, query) + number] * self.block_size + offset
        visible = np.where(query == 1, context + 1, context)
        entries = self._entries(blocks, base, visible)
        self._check_ids(entries.ids, slots)
        rows = StepRows(
            blocks, base, held, context, query, logits, is_prefill, first, tokens, positions, slots
        )
        return rows, entries

    def _plan(self, rows: StepRows, entries: BlockEntries) -> StepPlan:
        shared = self._repeated(entries.ids)
        if len(rows.tokens) > len(rows.query):
            shared = shared | (rows.query > 1)[entries.owner]
        return StepPlan(rows, entries, shared, self.block_size)

    def _entries(self, blocks: Ints, base: Ints, visible: Ints) -> BlockEntries:
        counts = -(-visible // self.block_size)
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(owner)) - first[owner]
        starts = index * self.block_size
        usage = np.minimum(visible[owner] - starts, self.block_size)
        return BlockEntries(blocks[base[owner] + index], owner, starts, usage)

    def _repeated(self, ids: Ints) -> NDArray[np.bool_]:
        # The last entry of a block wins its place; whoever did not win shares the block with it.
        order = np.arange(len(ids))
        self._last_entry[ids] = order
        lost: NDArray[np.bool_] = self._last_entry[ids] != order
        if not lost.any():
            return lost
        self._is_repeated[ids[lost]] = True
        repeated: NDArray[np.bool_] = self._is_repeated[ids]
        self._is_repeated[ids[lost]] = False
        return repeated

    def _check_lengths(
        self, held: Ints, context: Ints, query: Ints, logits: Ints, tokens: int
    ) -> None:
        room = held * self.block_size
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

    def _check_ids(self, ids: Ints, slots: Ints) -> None:
        low = min(int(ids.min(initial=1)), int(slots.min()) // self.block_size)
        high = max(int(ids.max(initial=1)), int(slots.max()) // self.block_size)
        if low < 1 or high >= self.num_blocks:
            raise ValueError(
                f"expected block ids in 1..{self.num_blocks - 1}, got {low}..{high}: "
                "block 0 is the null block, and the cache ends at num_blocks"
            )
        order = np.arange(len(slots))
        self._last_writer[slots] = order
        if (self._last_writer[slots] != order).any():
            raise ValueError(
                "expected a slot of its own for every new token of a step, got two with one slot: "
                "requests that share a block must copy it before they write to it"
            )


def _check_sizes(rows: Ints, *others: NDArray[Any]) -> None:
    sizes = [len(each) for each in others]
    if any(size != len(rows) for size in sizes):
        raise ValueError(
            f"expected context, query, logits and is_prefill of {len(rows)} rows, got {sizes}: "
            "list every request in each"
        )
