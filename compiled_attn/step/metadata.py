"""Step metadata for `paged_attention_v1/v2` and variable-length flash attention.

Made from the same `StepPlan` as the unified metadata, so that one step can feed any of the
interfaces. Field names and meanings are those of vLLM's attention metadata.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True)
class AttentionMetadata:
    """One step, request by request, in the order they were given.

    ``context_len`` counts tokens that were computed before, ``query_len`` tokens of this step,
    ``seq_len`` both. A request is a prefill while tokens of its prompt are computed, else a decode.
    Maxima are 0 where there is no request of the kind. A padded request has length 0, its table
    points at the null block, and the running sums stay flat over it.

    Shape (R requests, T tokens, W blocks of a table):
        - slot_mapping: ``[T]`` int64, slot of each new token; padding points into null block 0
        - seq_lens: R Python ints; seq_lens_tensor, context_lens_tensor: ``[R]`` int32
        - query_start_loc, seq_start_loc: ``[R + 1]`` int32, running sums of query_len and seq_len
        - block_tables: ``[R, W]`` int32, padded with null block 0; ``[0, 0]`` where left out
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: Tensor
    seq_lens: list[int]
    seq_lens_tensor: Tensor
    max_query_len: int
    max_prefill_seq_len: int
    max_decode_seq_len: int
    query_start_loc: Tensor
    seq_start_loc: Tensor
    context_lens_tensor: Tensor
    block_tables: Tensor
    use_captured_graph: bool
