"""Attention over a part of the keys, and the merge of such parts into the whole.

A softmax over all keys can be taken over disjoint groups of keys first, as long as every group
keeps its row maximum and row sum (FlashAttention's rescaling, Dao et al. 2022; the split into
causal, shared and unique groups follows the unified attention of the Gaudi vLLM plugin).

Every function computes in float32 for half precision inputs (float64 stays float64): scores, row
statistics and unnormalised outputs alike, so a long context never overflows float16.
Here is the readable definition; `compiled_attn.kernels` holds faster forms of `attend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "FEPS",
    "FMIN",
    "Attend",
    "PartialAttention",
    "attend",
    "gather_blocks",
    "lse",
    "merge",
    "merge_online",
    "partial_attn_causal",
    "partial_attn_shared",
    "partial_attn_sinks",
    "partial_attn_unique",
    "usage_bias",
]

FMIN = torch.finfo(torch.float32).min
"""Finite floor for row maxima: a row that sees nothing has this maximum, never -inf."""

FEPS = torch.finfo(torch.float32).tiny
"""Floor for the softmax denominator: a row that sees nothing divides 0 by this."""


class PartialAttention(NamedTuple):
    """Attention over some of the keys, not yet normalised.

    Shape:
        - out: ``[T, H, D]``, ``sum_j exp(s_j - max) * v_j``
        - max: ``[T, H]``, row maximum of the scores, at least ``fmin``
        - sum: ``[T, H]``, ``sum_j exp(s_j - max)``; 0 where a row sees no key
    """

    out: Tensor
    max: Tensor
    sum: Tensor


Attend = Callable[..., PartialAttention]
"""The signature of `attend`, which faster kernels share."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    fmin: float = FMIN,
) -> PartialAttention:
    """Dense attention of every query against every key under a bias: the reference.

    Args:
        query: ``[T, H, D]``.
        key: ``[N, Hk, D]``; query head h reads key head ``h // (H // Hk)``. Rows of ``key`` and
            ``value`` that no query sees must be finite: 0 * NaN is NaN.
        value: ``[N, Hk, Dv]``.
        bias: ``[T, N]`` or ``[H, T, N]``, added to the scores; -inf hides a key.
        scale: factor of the scores.
        softcap: cap c of ``c * tanh(score / c)``, applied after the scale and before the bias.
        fmin: finite floor of the row maxima.
    """
    queries, heads, _ = query.shape
    kv_heads = key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3).flatten(1, 2)
    keys = key.permute(1, 2, 0)
    values = value.permute(1, 0, 2)

    scores = torch.bmm(grouped.to(dtype), keys.to(dtype)).view(
        heads, queries, -1
    )  # from [Hk, G*T, N]
    weights, row_max = _exp_scores(_capped(scores * scale, softcap), bias, fmin)
    out = torch.bmm(weights.reshape(kv_heads, -1, key.shape[0]), values.to(dtype))
    return PartialAttention(
        out.view(heads, queries, -1).transpose(0, 1),
        row_max.transpose(0, 1),
        weights.sum(-1).transpose(0, 1),
    )


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
    """New tokens against new tokens, in slices.

    Slice i of the queries is compared with the keys ``0 .. end of slice i`` only, so about half of
    the score matrix is never computed.

    Args:
        query: ``[T, H, D]``.
        key, value: ``[T, Hk, D]``, this step's tokens.
        bias: ``[T, T]`` (or ``[H, T, T]``), 0 where token i may see new token j, else -inf. It must
            hide keys that come later in the batch. None: no token has a causal part.
        width: queries in a slice; None: one slice.

    Returns:
        The partial attention, or None if ``bias`` is None.
    """
    if bias is None:
        return None
    tokens = query.shape[0]
    width = tokens if width is None else width
    real = _seen(bias).view(-1, 1, 1)
    key, value = torch.where(real, key, 0), torch.where(real, value, 0)
    slices = []
    for start in range(0, tokens, width):
        end = min(start + width, tokens)
        part_bias = bias[..., start:end, :end]
        slices.append(
            attend(
                query[start:end],
                key[:end],
                value[:end],
                part_bias,
                scale=scale,
                softcap=softcap,
                fmin=fmin,
            )
        )
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
    lengths: Tensor | None = None,
    chunk: int | None = None,
    attend: Attend = attend,
) -> PartialAttention | None:
    """Every query against every shared block: one read of a prefix serves all who share it.

    Args:
        query: ``[T, H, D]``.
        key_cache, value_cache: flat slots ``[num_blocks * block_size, Hk, D]``.
        blocks: ``[S]`` block ids, padded with null block 0. None: nothing is shared.
        bias: ``[T, S, block_size]`` (or ``[H, T, S, block_size]``), added to the scores; or usages
            ``[T, S]`` (an integer tensor): how many leading slots of a block each token sees.
        lengths: ``[S]`` ints, leading slots of each block that hold anything; None: derived from
            the bias. Slots from there on are never read as numbers.
        chunk: blocks that are compared at a time; the bias of a chunk is made from its usages on
            the fly. None: all at once.

    Returns:
        The partial attention, or None if ``blocks`` or ``bias`` is None.
    """
    if blocks is None or bias is None or not blocks.shape[0]:
        return None
    is_usage = not bias.is_floating_point()
    total = blocks.shape[0]
    merged: PartialAttention | None = None
    for start in range(0, total, chunk or total):
        part = slice(start, min(start + (chunk or total), total))
        part_bias = usage_bias(bias[:, part], block_size) if is_usage else bias[..., part, :]
        if lengths is not None:
            used = _slots(block_size, blocks) < lengths[part].unsqueeze(-1)
        elif is_usage:
            used = _slots(block_size, blocks) < bias[:, part].amax(0).unsqueeze(-1)
        else:
            used = _seen(part_bias.flatten(-2)).view(-1, block_size)
        attended = attend(
            query,
            gather_blocks(key_cache, blocks[part], used).flatten(0, 1),
            gather_blocks(value_cache, blocks[part], used).flatten(0, 1),
            part_bias.flatten(-2),
            scale=scale,
            softcap=softcap,
            fmin=fmin,
        )
        merged = attended if merged is None else merge_online(merged, attended)
    return merged


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
    queries_used: Tensor | None = None,
) -> PartialAttention | None:
    """Each block against the one query that uses it; block results are reduced to their query.

    Products and sums, and a matmul of a single row, which inductor decomposes to that, fuse with
    the gather of the blocks: no buffer of the size of the gathered cache exists.

    Args:
        query: ``[T, H, D]``.
        key_cache, value_cache: flat slots ``[num_blocks * block_size, Hk, D]``.
        blocks: ``[U]`` block ids, padded with null block 0; an int U: the first U blocks of the
            cache, read without a gather; None: nothing is unique.
        block_mapping: ``[U]``, the row of ``query`` that uses each block (0 for padding).
        bias: ``[U, block_size]`` (or ``[U, H, block_size]``), added to the scores; -inf hides a
            slot.
        queries_used: ``[Q]``, the rows that occur in ``block_mapping``, padded with -1 (compared,
            never used as an index). Optional: with few of them the reduction is much cheaper.

    Returns:
        The partial attention, or None if ``blocks`` or ``bias`` is None.
    """
    if blocks is None or bias is None or block_mapping is None or not block_mapping.shape[0]:
        return None
    tokens, heads, _ = query.shape
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)
    bias = bias.unsqueeze(1) if bias.dim() == 2 else bias
    seen = (bias > -math.inf).any(1)  # [U, block_size]
    keys = _unique_blocks(key_cache, blocks, block_size).unsqueeze(3).to(dtype)
    values = _unique_blocks(value_cache, blocks, block_size).permute(0, 2, 1, 3).unsqueeze(2)
    values = torch.where(seen[:, None, None, :, None], values, 0).to(dtype)
    queries = query.unflatten(1, (1, kv_heads, group))[block_mapping].to(dtype)

    scores = (keys * queries).sum(-1)  # [U, block, Hk, G]
    scores = scores.flatten(2).transpose(1, 2)  # [U, H, block]
    weights, block_max = _exp_scores(_capped(scores * scale, softcap), bias, fmin)
    out = torch.matmul(weights.view(-1, kv_heads, group, 1, block_size), values)
    out = out.reshape(-1, heads, values.shape[-1])
    parts, owner = PartialAttention(out, block_max, weights.sum(-1)), block_mapping
    if queries_used is not None:
        parts, owner = _reduce(parts, owner, queries_used), queries_used
    return _reduce(parts, owner, torch.arange(tokens, device=owner.device))


def partial_attn_sinks(sinks: Tensor | None, like: PartialAttention) -> PartialAttention | None:
    """Attention sinks as a part of their own: one key per head with a learned score and value zero.

    Args:
        sinks: ``[H]`` scores, or None.
        like: any part of the same step, for its shapes.

    Source: attention sinks as in gpt-oss (an extra softmax column per head).
    """
    if sinks is None:
        return None
    row_max = sinks.to(like.max.dtype).expand_as(like.max)
    return PartialAttention(torch.zeros_like(like.out), row_max, torch.ones_like(like.sum))


def merge(*parts: PartialAttention | None, feps: float = FEPS) -> Tensor:
    """Normalised attention over the union of the parts' keys, ``[T, H, D]``; zeros where no key is
    seen.

    Raises:
        ValueError: every part is absent.
    """
    present = _present(parts)
    row_max = _common_max(present)
    out, total = torch.zeros_like(present[0].out), torch.zeros_like(row_max)
    for part in present:
        factor = torch.exp(part.max - row_max)
        out = out + part.out * factor.unsqueeze(-1)
        total = total + part.sum * factor
    return out / total.clamp_min(feps).unsqueeze(-1)


def merge_online(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Two parts as one part: the merge one step at a time, for long rows of chunks."""
    row_max = torch.maximum(first.max, second.max)
    old, new = torch.exp(first.max - row_max), torch.exp(second.max - row_max)
    out = first.out * old.unsqueeze(-1) + second.out * new.unsqueeze(-1)
    return PartialAttention(out, row_max, first.sum * old + second.sum * new)


def lse(*parts: PartialAttention | None) -> Tensor:
    """Natural log-sum-exp of the scores over all parts, ``[T, H]``; -inf where no key is seen.

    Raises:
        ValueError: every part is absent.
    """
    present = _present(parts)
    row_max = _common_max(present)
    total = torch.zeros_like(row_max)
    for part in present:
        total = total + part.sum * torch.exp(part.max - row_max)
    return row_max + torch.log(total)


def usage_bias(usage: Tensor, block_size: int) -> Tensor:
    """0 for the first ``usage`` slots of a block, else -inf: ``[...] -> [..., block_size]``."""
    visible = _slots(block_size, usage) < usage.unsqueeze(-1)
    return torch.where(visible, 0.0, -math.inf)


def gather_blocks(cache: Tensor, blocks: Tensor, used: Tensor) -> Tensor:
    """Blocks of a flat cache as ``[B, block_size, Hk, D]``, with zeros in unused slots.

    Args:
        cache: ``[num_blocks * block_size, Hk, D]``.
        blocks: ``[B]`` ids.
        used: ``[B, block_size]`` bool. What lies in other slots may be NaN, and 0 * NaN is NaN.
    """
    gathered = _by_block(cache, used.shape[-1])[blocks]
    return torch.where(used[:, :, None, None], gathered, 0)


def _unique_blocks(cache: Tensor, blocks: Tensor | int, block_size: int) -> Tensor:
    by_block = _by_block(cache, block_size)
    return by_block[:blocks] if isinstance(blocks, int) else by_block[blocks]


def _by_block(cache: Tensor, block_size: int) -> Tensor:
    return cache.view(-1, block_size, *cache.shape[1:])


def _slots(block_size: int, like: Tensor) -> Tensor:
    return torch.arange(block_size, device=like.device)


def _seen(bias: Tensor) -> Tensor:
    """Keys that at least one query (of any head) sees: ``[..., T, N] -> [N]``."""
    return (bias > -math.inf).flatten(0, -2).any(0)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _exp_scores(scores: Tensor, bias: Tensor, fmin: float) -> tuple[Tensor, Tensor]:
    # `where` instead of a plain sum: a poisoned score is NaN, and NaN + -inf is NaN.
    biased = torch.where(bias > -math.inf, scores + bias, -math.inf)
    row_max = biased.amax(-1).clamp_min(fmin)
    return torch.exp(biased - row_max.unsqueeze(-1)), row_max


def _reduce(parts: PartialAttention, owner: Tensor, rows: Tensor) -> PartialAttention:
    """Merges n parts ``[n, H, ...]`` to rows: part i belongs to the row that equals its owner."""
    # A comparison one-hot: unlike scatter and index_add it fuses, it sums in a fixed order, and no
    # value of `owner` is ever an index.
    uses = rows.unsqueeze(1) == owner  # [R, n]
    floor = torch.finfo(parts.max.dtype).min
    row_max = torch.where(uses.unsqueeze(-1), parts.max, floor).amax(1)
    onehot = uses.to(parts.out.dtype)
    own_max = torch.where(uses.unsqueeze(-1), row_max.unsqueeze(1), floor).amax(0)  # no rounding
    factor = torch.exp(parts.max - own_max)
    out = onehot @ (parts.out * factor.unsqueeze(-1)).flatten(1)
    return PartialAttention(
        out.unflatten(1, parts.out.shape[1:]), row_max, onehot @ (parts.sum * factor)
    )


def _present(parts: tuple[PartialAttention | None, ...]) -> list[PartialAttention]:
    present = [part for part in parts if part is not None]
    if not present:
        raise ValueError(
            "expected at least one part of the attention, got none: "
            "give the step a causal bias, shared blocks or unique blocks"
        )
    return present


def _common_max(parts: list[PartialAttention]) -> Tensor:
    row_max = parts[0].max
    for part in parts[1:]:
        row_max = torch.maximum(row_max, part.max)
    return row_max
