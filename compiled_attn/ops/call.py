"""The arguments of a call of the op ``paged_attention``."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from compiled_attn.attention.scoring import Scoring

__all__ = ["NewTokens", "PagedCall"]


class NewTokens(NamedTuple):
    """New tokens, written to the caches before attention.

    Shape:
        - key: ``[T, Hk, D]`` in the query's dtype
        - value: ``[T, Hk, Dv]`` in the query's dtype
        - slot_mapping: ``[T]`` ints, slot ``block * block_size + offset`` of each token; padding
          points to null block 0
    """

    key: Tensor
    value: Tensor
    slot_mapping: Tensor


class PagedCall(NamedTuple):
    """The arguments of `compiled_attn.ops.reference.paged_attention`, under the same names.

    ``new``: tokens written first; None: the caches are only read.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scoring: Scoring
    causal: bool = True
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    new: NewTokens | None = None
    segment: int | None = None

    @classmethod
    def of(
        cls,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        *,
        causal: bool = True,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        new: NewTokens | None = None,
        segment: int | None = None,
        **scoring: Any,
    ) -> PagedCall:
        """Builds a call from the op's arguments; ``scoring``: those of `Scoring` but the scale."""
        return cls(
            query, key_cache, value_cache, block_table, seq_lens, query_start_loc,
            Scoring(scale, **scoring), causal, key_scale, value_scale, new, segment,
        )  # fmt: skip
