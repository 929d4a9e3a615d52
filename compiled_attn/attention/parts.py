"""The causal, shared and unique parts of unified attention, and attention sinks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_attn.attention.dense import attend, exp_scores
from compiled_attn.attention.merge import reduce_to_rows
from compiled_attn.attention.scoring import capped
from compiled_attn.attention.state import (
    FMIN,
    Attend,
    PartialAttention,
    has_no_queries,
    of_no_queries,
)
from compiled_attn.cache.kv_cache import (
    gather_blocks,
    read_blocks,
    slots_of,
    strict_index,
    usage_bias,
)

__all__ = [
    "partial_attn_causal",
    "partial_attn_shared",
    "partial_attn_sinks",
    "partial_attn_unique",
]


def partial_attn_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    width: int | None = None,
    fmin: float = FMIN,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    attend: Attend = attend,
) -> PartialAttention | None:
    """Attends new tokens to new tokens, in slices.

    Slice i of the queries is compared with the keys ``0 .. end of slice i`` only, which skips about
    half of the score matrix.

    Args:
        query: ``[T, H, D]``.
        key, value: ``[T, Hk, D]``, this step's tokens.
        bias: ``[T, T]`` (or ``[H, T, T]``), 0 if token i sees new token j, else -inf. It must
            hide later tokens of the batch. None: no token has a causal part.
        width: queries in a slice; None: one slice.

    Returns:
        The partial attention, or None if ``bias`` is None.
    """
    if bias is None:
        return None
    tokens = query.shape[0]
    if has_no_queries(query):
        return of_no_queries(query, value)
    width = tokens if width is None else width
    options = {"scale": scale, "softcap": softcap, "fmin": fmin}
    slices = []
    for start in range(0, tokens, width):
        end = min(start + width, tokens)
        part = query[start:end], key[:end], value[:end], bias[..., start:end, :end]
        slices.append(attend(*part, **options))
    if len(slices) == 1:
        return slices[0]
    return PartialAttention(*(torch.cat(parts) for parts in zip(*slices, strict=True)))


def partial_attn_shared(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor | None,
    bias: Tensor | None,
    block_size: int,
    fmin: float = FMIN,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    attend: Attend = attend,
) -> PartialAttention | None:
    """Attends every query to every shared block: a prefix is read once for all requests.

    Args:
        query: ``[T, H, D]``.
        key_cache, value_cache: flat slots ``[num_blocks * block_size, Hk, D]``.
        blocks: ``[S]`` block ids, padded with null block 0. None: nothing is shared.
        bias: ``[T, S, block_size]`` (or ``[H, T, S, block_size]``), added to the scores; or usages
            ``[T, S]`` (integers): number of leading slots of a block that each token sees.
        key_scale, value_scale: ``[num_blocks * block_size, Hk]`` of quantised caches.
        lengths: ``[S]`` ints, number of leading slots of each block in use; others are read as
            zeros. None: all slots are read.

    Returns:
        The partial attention, or None if ``blocks`` or ``bias`` is None. Long lists of blocks can
        be split into pieces for `merge_online`.
    """
    if blocks is None or bias is None or not blocks.shape[0]:
        return None
    if not bias.is_floating_point():
        bias = usage_bias(bias, block_size)
    caches = (key_cache, key_scale), (value_cache, value_scale)
    if lengths is None:
        key, value = (read_blocks(cache, blocks, block_size, scale) for cache, scale in caches)
    else:
        used = slots_of(block_size, blocks) < lengths.unsqueeze(-1)
        key, value = (gather_blocks(cache, blocks, used, scale) for cache, scale in caches)
    tokens = key.flatten(0, 1), value.flatten(0, 1), bias.flatten(-2)
    return attend(query, *tokens, scale=scale, softcap=softcap, fmin=fmin)


def partial_attn_unique(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor | int | None,
    block_mapping: Tensor | None,
    bias: Tensor | None,
    block_size: int,
    fmin: float = FMIN,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    queries_used: Tensor | None = None,
) -> PartialAttention | None:
    """Attends the query of each block to that block; reduces block results by query.

    Products and sums, and a matmul of a single row, which inductor decomposes to that, fuse with
    the gather of the blocks, so that gathered blocks are not stored.

    Args:
        query: ``[T, H, D]``.
        key_cache, value_cache: flat slots ``[num_blocks * block_size, Hk, D]``.
        blocks: ``[U]`` block ids, padded with null block 0; an int U: the first U blocks of the
            cache, read without a gather; None: nothing is unique.
        block_mapping: ``[U]``, the row of ``query`` that reads each block (0 for padding).
        bias: ``[U, block_size]`` (or ``[U, H, block_size]``), added to the scores; -inf hides a
            slot.
        key_scale, value_scale: ``[num_blocks * block_size, Hk]`` of quantised caches.
        queries_used: ``[Q]``, the rows in ``block_mapping``, padded with -1 (compared, never used
            as an index). Optional: with few of them the reduction is much cheaper.

    Returns:
        The partial attention, or None if ``blocks`` or ``bias`` is None.
    """
    if blocks is None or bias is None or block_mapping is None or not block_mapping.shape[0]:
        return None
    tokens, heads, _ = query.shape
    if has_no_queries(query):  # there is no row for the mapping of padding
        return of_no_queries(query, value_cache)
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)
    bias = bias.unsqueeze(1) if bias.dim() == 2 else bias
    seen = (bias > -math.inf).any(1)  # [U, block_size]
    keys = read_blocks(key_cache, blocks, block_size, key_scale).unsqueeze(3).to(dtype)
    values = read_blocks(value_cache, blocks, block_size, value_scale)
    values = values.permute(0, 2, 1, 3).unsqueeze(2)
    values = torch.where(seen[:, None, None, :, None], values, 0).to(dtype)
    own_query = strict_index(block_mapping, tokens)
    queries = query.unflatten(1, (1, kv_heads, group))[own_query].to(dtype)

    scores = (keys * queries).sum(-1)  # [U, block, Hk, G]
    scores = scores.flatten(2).transpose(1, 2)  # [U, H, block]
    weights, block_max = exp_scores(capped(scores * scale, softcap), bias, fmin)
    out = torch.matmul(weights.view(-1, kv_heads, group, 1, block_size), values)
    out = out.reshape(-1, heads, values.shape[-1])
    parts, owner = PartialAttention(out, block_max, weights.sum(-1)), block_mapping
    if queries_used is not None and queries_used.shape[0]:  # else a step without logits
        parts, owner = reduce_to_rows(parts, owner, queries_used), queries_used
    return reduce_to_rows(parts, owner, torch.arange(tokens, device=owner.device))


def partial_attn_sinks(sinks: Tensor | None, like: PartialAttention) -> PartialAttention | None:
    """Returns attention sinks as a part: one key per head with a learned score and value zero.

    Args:
        sinks: ``[H]`` scores, or None.
        like: any part of the same step, for its shapes.

    Source: attention sinks as in gpt-oss (an extra softmax column per head).
    """
    if sinks is None:
        return None
    row_max = sinks.to(like.max.dtype).expand_as(like.max)
    return PartialAttention(torch.zeros_like(like.out), row_max, torch.ones_like(like.sum))
