"""Unified attention of requests whose blocks are on several ranks: gathers and merges parts."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from compiled_attn.attention.merge import lse as log_sum_exp
from compiled_attn.attention.merge import merge
from compiled_attn.attention.metadata import KeyRanks, UnifiedMetadata
from compiled_attn.attention.parts import partial_attn_sinks
from compiled_attn.attention.state import FMIN, PartialAttention
from compiled_attn.ops import PagedCall, attend_paged, unavailable

__all__ = ["attend_ranks", "gathered"]


def attend_ranks(
    call: PagedCall, key: Tensor, value: Tensor, metadata: UnifiedMetadata
) -> tuple[Tensor, Tensor]:
    """Out ``[T, H, Dv]`` and lse ``[T, H]``, in float32 and the same on every rank.

    Each rank attends to its own keys of earlier steps, all of which every new token sees, and the
    ranks exchange the results. Every rank has the keys of this step, whichever rank stores them,
    and attends to all of them causally, without communication.

    Source: merging by log-sum-exp as in Flash-Decoding (2023) and ring attention (2023).
    """
    ranks = metadata.ranks
    assert ranks is not None
    unavailable()  # registers the op
    key, value = key.to(call.query.dtype), value.to(call.query.dtype)
    earlier = attend_paged(call._replace(scoring=replace(call.scoring, sinks=None), causal=False))
    parts = [*gathered(*earlier, ranks), _part(*_new(call, key, value))]
    if (sink := partial_attn_sinks(call.scoring.sinks, parts[0])) is not None:
        parts.append(sink)
    return merge(*parts, feps=metadata.feps), log_sum_exp(*parts).float()


def gathered(out: Tensor, lse: Tensor, ranks: KeyRanks) -> list[PartialAttention]:
    """Returns the results of all ranks, in order, by one collective: own out ``[T, H, Dv]``, zero
    in a row without visible keys, and lse ``[T, H]``, -inf in such a row.
    """
    ops = torch.ops._c10d_functional  # functional, as torch.compile requires
    wide = torch.promote_types(out.dtype, torch.float32)
    own = torch.cat([out.to(wide), lse.to(wide).unsqueeze(-1)], -1).contiguous()
    every = ops.wait_tensor(ops.all_gather_into_tensor(own, ranks.size, ranks.group))
    return [_part(each[..., :-1], each[..., -1]) for each in every.chunk(ranks.size)]


def _new(call: PagedCall, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention among the new tokens of each request: a cache of blocks of one token."""
    starts = call.query_start_loc
    rows = torch.arange(key.shape[0], device=starts.device, dtype=starts.dtype)
    table, counts = starts[:-1].unsqueeze(-1) + rows, starts.diff()
    scoring = replace(call.scoring, sinks=None)
    return attend_paged(
        PagedCall(call.query, key.unsqueeze(1), value.unsqueeze(1), table, counts, starts, scoring)
    )


def _part(out: Tensor, lse: Tensor) -> PartialAttention:
    """A normalised result as a part: its sum is 1, or 0 in a row without visible keys."""
    is_empty = lse == -math.inf
    wide = torch.promote_types(out.dtype, torch.float32)
    total = (~is_empty).to(wide)
    return PartialAttention(out.to(wide), lse.to(wide).masked_fill(is_empty, FMIN), total)
