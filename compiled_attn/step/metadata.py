"""Step metadata in the vocabulary of `paged_attention_v1/v2` and of variable-length flash
attention.

Made from the same `StepPlan` as the unified metadata, so that one step can feed any of the
interfaces. Field names and meanings are those of vLLM's attention metadata.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compiled_attn.step.rows import Ints

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

    @staticmethod
    def of(
        context: Ints,
        query: Ints,
        is_prefill: np.ndarray,
        slots: Ints,
        tables: Ints,
        *,
        requests: int,
        tokens: int,
        use_captured_graph: bool,
    ) -> AttentionMetadata:
        """The metadata of a step, padded to ``requests`` and ``tokens``.

        Args:
            context, query: ``[r]`` lengths of the real requests.
            is_prefill: ``[r]`` bool.
            slots: ``[t]`` slots of the real tokens.
            tables: ``[requests, W]`` block tables, padded already.
            requests, tokens: sizes to pad to.
            use_captured_graph: whether the step runs a captured graph.
        """
        seq = context + query
        padded_query, padded_seq = _padded(query, requests), _padded(seq, requests)
        decode = ~is_prefill
        return AttentionMetadata(
            num_prefills=int(is_prefill.sum()),
            num_prefill_tokens=int(query[is_prefill].sum()),
            num_decode_tokens=int(query[decode].sum()),
            slot_mapping=torch.from_numpy(_padded(slots, tokens)),
            seq_lens=padded_seq.tolist(),
            seq_lens_tensor=_int32(padded_seq),
            max_query_len=int(query.max()),
            max_prefill_seq_len=int(seq[is_prefill].max(initial=0)),
            max_decode_seq_len=int(seq[decode].max(initial=0)),
            query_start_loc=_int32(_running_sum(padded_query)),
            seq_start_loc=_int32(_running_sum(padded_seq)),
            context_lens_tensor=_int32(_padded(context, requests)),
            block_tables=_int32(tables),
            use_captured_graph=use_captured_graph,
        )


def _padded(values: Ints, size: int) -> Ints:
    padded = np.zeros(size, np.int64)
    padded[: len(values)] = values
    return padded


def _running_sum(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _int32(values: Ints) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
