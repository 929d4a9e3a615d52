"""A step in parts: its plan before padding, and the padded tensors of a bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.cache.kv_cache import usage_bias
from compiled_attn.step.metadata import AttentionMetadata
from compiled_attn.step.requests import (
    Ints,
    StepRows,
    block_tables,
    check_holds,
    checked_sizes,
    logits_rows,
    padded,
)

__all__ = ["BlockEntries", "StepBatch", "StepPlan"]

_NONE: Ints = np.zeros(0, np.int64)


class StepBatch(NamedTuple):
    """One engine step of fixed shape: the inputs of a captured graph, in order.

    Shape (T tokens, S shared blocks, U unique blocks, L logits; parts that a bucket lacks are
    None):
        - input_ids, positions, slot_mapping: ``[T]`` int64
        - logits_index: ``[L]`` int64, rows of T that need logits, requests in order
        - causal_group: ``[T]`` int64, ordinal of the request of each token that has a causal part,
          else -1 (compared, never used as an index)
        - shared_blocks, shared_starts, shared_lengths: ``[S]`` int64
        - shared_usage: ``[T, S]`` int32, leading slots of each block that each token sees
        - unique_blocks, unique_mapping, unique_usage, unique_starts: ``[U]`` int64
        - unique_queries: ``[L]`` int64, rows of T that use unique blocks, padded with -1 (compared,
          never used as an index)
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logits_index: Tensor
    causal_group: Tensor | None = None
    shared_blocks: Tensor | None = None
    shared_usage: Tensor | None = None
    shared_starts: Tensor | None = None
    shared_lengths: Tensor | None = None
    unique_blocks: Tensor | None = None
    unique_mapping: Tensor | None = None
    unique_usage: Tensor | None = None
    unique_starts: Tensor | None = None
    unique_queries: Tensor | None = None

    @classmethod
    def padding(cls, bucket: Mapping[str, int]) -> StepBatch:
        """Returns a step of padding alone, which writes to the null block only.

        Args:
            bucket: sizes ``tokens``, ``shared``, ``unique``, ``logits``, 0 for a missing part;
                ``causal`` is 1 by default. Other axes are ignored.

        Raises:
            ValueError: a size is missing or negative.
        """
        sizes = checked_sizes({"causal": 1, **bucket}, ("tokens", "shared", "unique", "logits"))
        tokens, shared, unique = sizes["tokens"], sizes["shared"], sizes["unique"]

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        step = cls(zeros(tokens), zeros(tokens), zeros(tokens), zeros(sizes["logits"]))
        if sizes["causal"]:
            step = step._replace(causal_group=zeros(tokens) - 1)
        if shared:
            step = step._replace(
                shared_blocks=zeros(shared),
                shared_usage=zeros(tokens, shared, dtype=torch.int32),
                shared_starts=zeros(shared),
                shared_lengths=zeros(shared),
            )
        if unique:
            step = step._replace(
                unique_blocks=zeros(unique),
                unique_mapping=zeros(unique),
                unique_usage=zeros(unique),
                unique_starts=zeros(unique),
                unique_queries=zeros(sizes["logits"]) - 1,
            )
        return step

    def metadata(
        self, block_size: int, causal_width: int | None = None, shared_chunk: int | None = None
    ) -> UnifiedMetadata:
        """Returns the metadata for `unified_attention`: traceable, no host work."""
        shared = self.shared_usage
        if shared is not None and shared_chunk is None:
            shared = usage_bias(shared, block_size)
        return UnifiedMetadata(
            block_size=block_size,
            slot_mapping=self.slot_mapping,
            causal_bias=self._causal_bias(),
            causal_width=causal_width,
            shared_blocks=self.shared_blocks,
            shared_bias=shared,
            shared_chunk=shared_chunk,
            unique_blocks=self.unique_blocks,
            unique_block_mapping=self.unique_mapping,
            unique_bias=(
                None if self.unique_usage is None else usage_bias(self.unique_usage, block_size)
            ),
            positions=self.positions,
            shared_starts=self.shared_starts,
            unique_starts=self.unique_starts,
            shared_lengths=self.shared_lengths,
            unique_queries=self.unique_queries,
        )

    def _causal_bias(self) -> Tensor | None:
        if self.causal_group is None:
            return None
        group, position = self.causal_group, self.positions
        same = (group.unsqueeze(1) == group.unsqueeze(0)) & (group >= 0)
        visible = same & (position.unsqueeze(0) <= position.unsqueeze(1))
        return torch.where(visible, 0.0, -math.inf)


class BlockEntries(NamedTuple):
    """Cached blocks that the step reads, one entry per request and block, all ``[n]``."""

    ids: Ints
    owner: Ints
    starts: Ints
    usage: Ints

    def where(self, mask: NDArray[np.bool_]) -> BlockEntries:
        """Selects entries by a mask."""
        return BlockEntries(*(field[mask] for field in self))


class StepPlan:
    """A planned step in parts, which can be padded to any bucket that holds it.

    Args:
        shared: ``[n]`` bool, which entries are read by more than one query token.
    """

    def __init__(
        self, rows: StepRows, entries: BlockEntries, shared: NDArray[np.bool_], block_size: int
    ) -> None:
        self.rows = rows
        self.block_size = block_size
        self._several = rows.query > 1
        self._unique, self._readers = entries, BlockEntries(*[_NONE] * 4)
        self._first_reader = self._column = _NONE
        if shared.any():
            self._unique, self._readers = entries.where(~shared), entries.where(shared)
            # A block may be at different positions in different requests: each is a column.
            position = self._readers.ids * (int(entries.starts.max()) + 1) + self._readers.starts
            _, self._first_reader, self._column = np.unique(
                position, return_index=True, return_inverse=True
            )
        # Each query with unique blocks is a request of one token, and L bounds their number too.
        owner = self._unique.owner  # ascending
        self._unique_owners = owner[np.flatnonzero(np.diff(owner, prepend=-1))]
        self.need = {
            "tokens": len(rows.tokens),
            "shared": len(self._first_reader),
            "unique": len(self._unique.ids),
            "logits": max(int(rows.logits.sum()), len(self._unique_owners)),
        }

    @property
    def has_causal(self) -> bool:
        """Whether some request has several new tokens."""
        return bool(self._several.any())

    def fill(self, bucket: Mapping[str, int] | None = None) -> StepBatch:
        """Pads the step to a bucket; None: to exactly what it needs.

        Raises:
            ValueError: the bucket is too small.
        """
        sizes, rows = self._sizes(bucket), self.rows
        tokens = sizes["tokens"]
        return StepBatch(
            input_ids=padded(rows.tokens, tokens),
            positions=padded(rows.positions, tokens),
            slot_mapping=padded(rows.slots, tokens),
            logits_index=padded(logits_rows(rows), sizes["logits"]),
            causal_group=self._causal_group(tokens) if sizes["causal"] else None,
            **(self._shared_part(tokens, sizes["shared"]) if sizes["shared"] else {}),
            **(self._unique_part(sizes["unique"], sizes["logits"]) if sizes["unique"] else {}),
        )

    def attention_metadata(
        self, block_size: int, bucket: Mapping[str, int] | None = None, *, tables: bool = True
    ) -> AttentionMetadata:
        """Returns metadata for `paged_attention_v1/v2` and for variable-length attention.

        Args:
            bucket: sizes ``tokens``, ``requests`` and ``width`` (blocks of a table) to pad to for a
                captured graph; others are not padded. None: no padding.
            tables: False leaves the block tables out of a step of first prefills, which read no
                cache.

        Raises:
            ValueError: the bucket is too small, or the block size another.
        """
        if block_size != self.block_size:
            raise ValueError(
                f"expected block_size {self.block_size}, got {block_size}: "
                "the step was planned for blocks of the builder's size"
            )
        rows = self.rows
        used = -(-(rows.context + rows.query) // block_size)
        need = {"tokens": len(rows.tokens), "requests": len(used), "width": int(used.max())}
        sizes = {**need, **{axis: n for axis, n in (bucket or {}).items() if axis in need}}
        check_holds(sizes, need)
        query, prefill, requests = rows.query, rows.is_prefill, sizes["requests"]
        leave_out = not tables and bool(prefill.all()) and not rows.context.any()
        held = (
            np.zeros((0, 0), np.int32)
            if leave_out
            else block_tables(rows, used, requests, sizes["width"])
        )
        seq = rows.context + query
        seq_lens = padded(seq, requests)
        return AttentionMetadata(
            num_prefills=int(prefill.sum()),
            num_prefill_tokens=int(query[prefill].sum()),
            num_decode_tokens=int(query[~prefill].sum()),
            slot_mapping=padded(rows.slots, sizes["tokens"]),
            seq_lens=seq_lens.tolist(),
            seq_lens_tensor=seq_lens.int(),
            max_query_len=int(query.max()),
            max_prefill_seq_len=int(seq[prefill].max(initial=0)),
            max_decode_seq_len=int(seq[~prefill].max(initial=0)),
            query_start_loc=_running_sum(padded(query, requests)),
            seq_start_loc=_running_sum(seq_lens),
            context_lens_tensor=padded(rows.context, requests).int(),
            block_tables=torch.from_numpy(held),
            use_captured_graph=bucket is not None,
        )

    def _sizes(self, bucket: Mapping[str, int] | None) -> dict[str, int]:
        need = {**self.need, "causal": int(self.has_causal)}
        if bucket is None:
            return need
        sizes = {**dict.fromkeys(self.need, 0), "causal": 1, **bucket}
        check_holds(sizes, need)
        return sizes

    def _causal_group(self, tokens: int) -> Tensor:
        if not self.has_causal:
            return torch.full((tokens,), -1)
        group = np.where(self._several, np.arange(len(self._several)), -1)
        return padded(np.repeat(group, self.rows.query), tokens, fill=-1)

    def _shared_part(self, tokens: int, size: int) -> dict[str, Tensor]:
        readers, column, rows = self._readers, self._column, self.rows
        usage = np.zeros((tokens, size), np.int32)
        single = ~self._several[readers.owner]
        usage[rows.first_row[readers.owner[single]], column[single]] = readers.usage[single]
        for owner in np.unique(readers.owner[~single]):
            mine = readers.owner == owner
            row = np.zeros(size, np.int32)
            row[column[mine]] = readers.usage[mine]
            start = rows.first_row[owner]
            usage[start : start + rows.query[owner]] = row
        lengths = np.zeros(size, np.int64)
        np.maximum.at(lengths, column, readers.usage)
        return {
            "shared_blocks": padded(readers.ids[self._first_reader], size),
            "shared_usage": torch.from_numpy(usage),
            "shared_starts": padded(readers.starts[self._first_reader], size),
            "shared_lengths": torch.from_numpy(lengths),
        }

    def _unique_part(self, size: int, queries: int) -> dict[str, Tensor]:
        first_row = self.rows.first_row
        return {
            "unique_blocks": padded(self._unique.ids, size),
            "unique_mapping": padded(first_row[self._unique.owner], size),
            "unique_usage": padded(self._unique.usage, size),
            "unique_starts": padded(self._unique.starts, size),
            "unique_queries": padded(first_row[self._unique_owners], queries, fill=-1),
        }


def _running_sum(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
