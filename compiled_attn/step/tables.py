"""Steps in tables, request by request: what the op reads, with two axes to pad."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.step.layout import ModelWork, StepLimits
from compiled_attn.step.requests import (
    Ints,
    StepRows,
    block_tables,
    check_holds,
    check_tables,
    checked_sizes,
    logits_rows,
    padded,
)
from graphs import BucketSpace, explicit

__all__ = ["SHARED", "StateTableBatch", "TableBatch", "TableLayout", "TablePlan"]

SHARED = ((64, 8), (2, 2))
"""Buckets of all ladders with segments, whose one graph is compiled for the first of them."""


_AXES = ("tokens", "requests")
_DRAFT_ROWS = 64  # beyond them a row takes as long with others as alone
_FEW = 8  # requests whose logits take no longer than reading the weights of the head


class TableBatch(NamedTuple):
    """One engine step of fixed shape for the op: inputs of a captured graph, in order.

    The op reads only ``seq_lens`` tokens, so the width of the tables costs nothing.

    Shape (T tokens, R requests, W blocks of the longest request):
        - input_ids, positions, slot_mapping: ``[T]`` int64
        - logits_index: ``[R]`` int64, rows of T that need logits, requests in order
        - block_tables: ``[R, W]`` int32, padded with null block 0
        - seq_lens: ``[R]`` int32, tokens of each request, those of this step included; 0: padding
        - query_start_loc: ``[R + 1]`` int32, running sum of the requests' new tokens
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logits_index: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    @classmethod
    def padding(cls, bucket: Mapping[str, int], width: int) -> TableBatch:
        """Returns a step of padding alone, which writes to the null block only.

        Args:
            bucket: sizes ``tokens``, ``requests``. Other axes are ignored.
            width: blocks of the longest request.

        Raises:
            ValueError: a size is missing or negative.
        """
        sizes = checked_sizes({**bucket, "width": width}, (*_AXES, "width"))
        tokens, requests = sizes["tokens"], sizes["requests"]
        ids, positions, slots = (torch.zeros(tokens, dtype=torch.int64) for _ in range(3))
        return cls(
            ids,
            positions,
            slots,
            torch.zeros(requests, dtype=torch.int64),
            torch.zeros(requests, width, dtype=torch.int32),
            torch.zeros(requests, dtype=torch.int32),
            torch.zeros(requests + 1, dtype=torch.int32),
        )

    def metadata(self, block_size: int) -> UnifiedMetadata:
        """Returns the metadata for `unified_attention`, without any work."""
        return UnifiedMetadata(
            block_size=block_size,
            slot_mapping=self.slot_mapping,
            positions=self.positions,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
        )

    def logits_metadata(self, block_size: int) -> UnifiedMetadata:
        """Returns the rows ``logits_index`` as requests of one token each, which write to the null
        block and see what their tokens do.

        Padding sees nothing, except the first one of a step without logits: it stands for the first
        token.
        """
        rows, ends = self.logits_index, self.query_start_loc[1:].long()
        # By comparison, which inductor fuses; torch.bucketize is a separate kernel.
        request = (ends <= rows[:, None]).sum(1).clamp_max(len(ends) - 1)
        seen = torch.minimum(self.positions[rows] + 1, self.seq_lens[request])
        number = torch.arange(len(rows) + 1, device=rows.device)
        is_padding = (rows == 0) & (number[:-1] > 0)  # rows are in order
        return UnifiedMetadata(
            block_size=block_size,
            slot_mapping=torch.zeros_like(rows),
            positions=self.positions[rows],
            block_tables=self.block_tables[request],
            seq_lens=torch.where(is_padding, 0, seen).int(),
            query_start_loc=number.int(),
        )


class StateTableBatch(NamedTuple):
    """A `TableBatch` of a model with recurrent states.

    Shape:
        - state_slots: ``[R]`` int32, slot of the states of each request; 0: padding
        - the others: see `TableBatch`
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logits_index: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    state_slots: Tensor

    @classmethod
    def padding(cls, bucket: Mapping[str, int], width: int) -> StateTableBatch:
        """See `TableBatch.padding`."""
        tables = TableBatch.padding(bucket, width)
        return cls(*tables, torch.zeros_like(tables.seq_lens))

    def metadata(self, block_size: int) -> UnifiedMetadata:
        """See `TableBatch.metadata`."""
        return replace(TableBatch(*self[:-1]).metadata(block_size), state_slots=self.state_slots)

    def logits_metadata(self, block_size: int) -> UnifiedMetadata:
        """See `TableBatch.logits_metadata`; for layers without states."""
        return TableBatch(*self[:-1]).logits_metadata(block_size)


class TablePlan:
    """A planned step in tables, which can be padded to any bucket that holds it.

    Args:
        width: default width of the tables; None: that of the longest request.
        has_states: see `TableLayout`.
    """

    def __init__(
        self, rows: StepRows, used: Ints, width: int | None = None, *, has_states: bool = False
    ) -> None:
        self.rows, self.used, self._has_states = rows, used, has_states
        # A bucket has as many rows of logits as requests.
        requests = max(len(rows.query), int(rows.logits.sum()))
        self.need = {"tokens": len(rows.tokens), "requests": requests}
        self._widest = int(used.max())
        self._width = self._widest if width is None else width

    def fill(
        self, bucket: Mapping[str, int] | None = None, width: int | None = None
    ) -> TableBatch | StateTableBatch:
        """Pads the step to a bucket and to tables of ``width`` blocks; None: to its need.

        Raises:
            ValueError: the bucket or the width is too small.
        """
        tables = self._fill(bucket, width)
        if not self._has_states:
            return tables
        slots = padded(self.rows.state_slots, len(tables.seq_lens)).int()
        return StateTableBatch(*tables, slots)

    def _fill(self, bucket: Mapping[str, int] | None, width: int | None) -> TableBatch:
        count = len(self.used)
        sizes = {**(bucket or self.need), "width": self._width if width is None else width}
        check_holds(sizes, {**self.need, "width": self._widest})
        rows, tokens, requests = self.rows, sizes["tokens"], sizes["requests"]
        lengths, starts = np.zeros(requests, np.int32), np.zeros(requests + 1, np.int32)
        lengths[:count] = rows.context + rows.query
        starts[1:] = len(rows.tokens)  # padded requests have no rows
        starts[1 : 1 + count] = np.cumsum(rows.query)
        return TableBatch(
            padded(rows.tokens, tokens),
            padded(rows.positions, tokens),
            padded(rows.slots, tokens),
            padded(logits_rows(rows), requests),
            torch.from_numpy(self._tables(requests, sizes["width"])),
            torch.from_numpy(lengths),
            torch.from_numpy(starts),
        )

    def _tables(self, requests: int, width: int) -> NDArray[np.int32]:
        tables = self.rows.in_place
        if tables is not None and len(tables) >= requests and tables.shape[1] == width:
            return tables[:requests]
        return block_tables(self.rows, self.used, requests, width)


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The layout of steps for the op, which reads what a step needs, whatever its bucket.

    Args:
        width: blocks of the longest request; None: that of each step, for graphs of no fixed width.
        has_states: whether the model has recurrent states: batches are then `StateTableBatch`.
        segment: see `compiled_attn.ops.reference.paged_attention`; the buckets are then for one
            graph, as other graphs may give other bits.
    """

    num_blocks: int
    block_size: int
    width: int | None = None
    has_states: bool = field(default=False, kw_only=True)
    segment: int | None = field(default=None, kw_only=True)

    axes = symbolic = _AXES
    reads_range = False

    def ladder(
        self, limits: StepLimits, max_graphs: int, *, one_compile: bool = False
    ) -> BucketSpace:
        """Returns decode buckets of 1, 2, 4 .. requests, and prefill buckets of more tokens.

        With drafts a step of decodes needs logits for each token, so there are decode buckets of
        more rows, also for 1, 2, 4 .. requests with a draft each.

        With fewer graphs it selects the largest sizes of each kind in turn. If one compile serves
        all buckets, there are also finer sizes of prefills with few requests: a prompt needs few
        rows of logits, and less of its last step is padding.
        """
        if self.segment is not None:  # there is no symbol for 1
            limits = replace(limits, tokens=max(2, limits.tokens), seqs=max(2, limits.seqs))
        largest = limits.tokens, limits.seqs
        decode = [(n, n) for n in _decode_sizes(limits) if n > 1 or self.segment is None]
        prefill = [(size, limits.seqs) for size in _doubling(2 * limits.seqs, limits.tokens)]
        decode, prefill = decode[::-1], [shape for shape in prefill[::-1] if shape != largest]
        sizes = [largest]
        if self.segment is not None:
            sizes += [shape for shape in SHARED if shape != largest]
            decode, prefill = ([s for s in each if s not in sizes] for each in (decode, prefill))
        while len(sizes) < max_graphs and (decode or prefill):
            sizes.append((decode if len(decode) >= len(prefill) else prefill).pop(0))
        if one_compile:
            few = _of_few([tokens for tokens, seqs in sizes if tokens > seqs], limits.seqs)
            sizes += [shape for shape in few if shape not in sizes][
                : max(0, max_graphs - len(sizes))
            ]
        return explicit(self.axes, sizes)

    def cost(self, work: ModelWork) -> Callable[[Mapping[str, int]], float]:
        """See `StepLayout.cost`: tokens and requests; padded requests read nothing."""
        return lambda bucket: work.linear * bucket["tokens"] + work.head * bucket["requests"]

    def least_bytes(self, bucket: Mapping[str, int]) -> int:
        """See `StepLayout.least_bytes`: the inputs."""
        return 24 * bucket["tokens"] + 4 * bucket["requests"] * (self.width or 1)

    def smallest_need(self, blocks: int) -> dict[str, int]:
        """See `StepLayout.smallest_need`; blocks do not matter."""
        return {"tokens": 1, "requests": 1}

    def largest_need(self, limits: StepLimits) -> dict[str, int] | None:
        """See `StepLayout.largest_need`: one bucket holds every step."""
        return {"tokens": limits.tokens, "requests": limits.seqs}

    def plan(self, rows: StepRows) -> TablePlan:
        """See `StepLayout.plan`."""
        used = -(-(rows.context + rows.query) // self.block_size)
        if rows.in_place is None:
            tables = block_tables(rows, used, len(used), int(used.max()))
            check_tables(tables, used, self.num_blocks, rows.unread)
        return TablePlan(rows, used, self.width, has_states=self.has_states)

    def padding(self, bucket: Mapping[str, int]) -> TableBatch | StateTableBatch:
        """See `TableBatch.padding`.

        Raises:
            ValueError: the layout has no width, so that there is no shape to capture.
        """
        if self.width is None:
            raise ValueError(
                "expected a layout of a fixed width, got none: pass width=, the blocks of "
                "the longest request"
            )
        batch = StateTableBatch if self.has_states else TableBatch
        return batch.padding(bucket, self.width)

    def batch(self, fields: Sequence[Tensor | None]) -> TableBatch | StateTableBatch:
        """See `StepLayout.batch`."""
        batch = StateTableBatch if self.has_states else TableBatch
        return batch(*fields)  # type: ignore[arg-type]  # none of its fields is None

    def metadata(self, batch: TableBatch | StateTableBatch, block_size: int) -> UnifiedMetadata:
        """See `TableBatch.metadata`."""
        return replace(batch.metadata(block_size), segment=self.segment)

    def logits_metadata(
        self, batch: TableBatch | StateTableBatch, block_size: int
    ) -> UnifiedMetadata | None:
        """See `TableBatch.logits_metadata`."""
        return replace(batch.logits_metadata(block_size), segment=self.segment)

    def over(self, num_blocks: int, block_size: int, width: int) -> TableLayout:
        """See `StepLayout.over`."""
        return TableLayout(
            num_blocks, block_size, width, has_states=self.has_states, segment=self.segment
        )


def _of_few(sizes: Iterable[int], seqs: int) -> list[tuple[int, int]]:
    """These sizes and three quarters of them for few requests, the largest first."""
    few = min(seqs, _FEW)
    finer = {of for size in sizes for of in (size, size * 3 // 4)}
    return [(size, few) for size in sorted(finer, reverse=True) if size > few]


def _decode_sizes(limits: StepLimits) -> list[int]:
    each = 1 + limits.draft
    most = max(limits.seqs, min(limits.seqs * each, _DRAFT_ROWS, limits.tokens))
    drafted = [each * 2**n for n in range(7)] if limits.draft else []
    return sorted({*_doubling(1, most), limits.seqs, *(size for size in drafted if size < most)})


def _doubling(first: int, last: int) -> list[int]:
    """``first, 2 * first, ..`` below ``last``, then ``last``; nothing above it."""
    sizes = [first * 2**n for n in range(64) if first * 2**n < last]
    return [*sizes, last]
