"""A step request by request: what the native kernel reads, with two axes to pad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.step.plan import StepRows, block_tables, check_holds, logits_rows, padded
from compiled_attn.step.sizes import checked_sizes

__all__ = ["TableBatch", "TablePlan"]


class TableBatch(NamedTuple):
    """One engine step of fixed shape for the native kernel: inputs of a captured graph, in order.

    The kernel reads only what ``seq_lens`` says, so the width of the tables costs nothing.

    Shape (T tokens, R requests, W blocks of the longest request):
        - input_ids, positions, slot_mapping: ``[T]`` int64
        - logits_index: ``[R]`` int64, rows of T whose logits are wanted, requests in order
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
        """A step of padding alone, to capture a bucket with: it writes to the null block only.

        Args:
            bucket: sizes ``tokens``, ``requests``. What else it has is not looked at.
            width: blocks of the longest request.

        Raises:
            ValueError: a size is missing or negative.
        """
        sizes = checked_sizes({**bucket, "width": width}, ("tokens", "requests", "width"))
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
        """The step for `unified_attention` with the native kernel; no work at all."""
        return UnifiedMetadata(
            block_size=block_size,
            slot_mapping=self.slot_mapping,
            positions=self.positions,
            block_tables=self.block_tables,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
        )


class TablePlan:
    """A step that knows what it needs and can be padded to any bucket that holds it.

    Args:
        rows: its requests and tokens.
        block_size: slots in a block.
    """

    def __init__(self, rows: StepRows, block_size: int) -> None:
        self.rows = rows
        self._used = -(-(rows.context + rows.query) // block_size)
        # A bucket has as many rows of logits as requests.
        requests = max(len(rows.query), int(rows.logits.sum()))
        self.need = {"tokens": len(rows.tokens), "requests": requests}

    def fill(self, bucket: Mapping[str, int] | None = None, width: int | None = None) -> TableBatch:
        """The step padded to a bucket and to tables of ``width`` blocks; None: to its need.

        Raises:
            ValueError: the bucket or the width is too small.
        """
        widest = int(self._used.max())
        sizes = {**(bucket or self.need), "width": widest if width is None else width}
        check_holds(sizes, {**self.need, "width": widest})
        rows, tokens, requests = self.rows, sizes["tokens"], sizes["requests"]
        lengths, starts = np.zeros(requests, np.int32), np.zeros(requests + 1, np.int32)
        lengths[: len(rows.query)] = rows.context + rows.query
        starts[1:] = len(rows.tokens)  # padded requests have no rows
        starts[1 : 1 + len(rows.query)] = np.cumsum(rows.query)
        tables = block_tables(rows, self._used, requests, sizes["width"])
        return TableBatch(
            padded(rows.tokens, tokens),
            padded(rows.positions, tokens),
            padded(rows.slots, tokens),
            padded(logits_rows(rows), requests),
            torch.from_numpy(tables.astype(np.int32)),
            torch.from_numpy(lengths),
            torch.from_numpy(starts),
        )
