"""The tensors of one step in parts, and what attention makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.attention.cached_blocks import usage_bias
from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.step.rows import checked_sizes

__all__ = ["StepBatch"]


class StepBatch(NamedTuple):
    """One engine step of fixed shape: the inputs of a captured graph, in order.

    Shape (T tokens, S shared blocks, U unique blocks, L logits; parts that a bucket lacks are
    None):
        - input_ids, positions, slot_mapping: ``[T]`` int64
        - logits_index: ``[L]`` int64, rows of T whose logits are wanted, requests in order
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
        """A step of padding alone, to capture a bucket with: it writes to the null block only.

        Args:
            bucket: sizes ``tokens``, ``shared``, ``unique``, ``logits``, 0 for a part that there is
                not; ``causal`` is 1 unless it says 0. What else it has is not looked at.

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
        """The step for `unified_attention`: traceable, no host work.

        Args:
            block_size: slots in a block.
            causal_width, shared_chunk: see `UnifiedMetadata`; without a chunk the bias of the
                shared blocks is made here, once for all layers.
        """
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
