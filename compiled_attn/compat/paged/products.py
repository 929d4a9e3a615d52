"""The two products of attention, with keys and values read by block in any layout.

A compiled graph uses products and sums, which inductor fuses with the gather of the blocks, so that
gathered keys are not stored. Eager mode gathers the blocks and multiplies matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.compat.paged.layouts import Layout, take_blocks

__all__ = ["scores", "weighted"]


def scores(query: Tensor, cache: Tensor, blocks: Tensor, block_size: int, layout: Layout) -> Tensor:
    """Returns dot products of queries ``[S, Hk, G, D]`` with the keys of blocks ``[S, P, Wp]``:
    ``[S, P, Hk, G, Wp * block_size]``, in the query's dtype.
    """
    if not torch.compiler.is_compiling():
        keys = _dense(cache, blocks, block_size, layout, query.dtype, is_key=True)
        return torch.matmul(query.unsqueeze(1), keys.mT)
    gathered = _by_block(cache, block_size, layout)[blocks]  # [S, P, Wp, ...]
    if layout == "packed":
        dots = _packed_scores(query, gathered)
    else:
        # [S, P, Wp, Hk, 1, BS, D]
        keys = _heads_first(gathered, layout).unsqueeze(4).to(query.dtype)
        dots = (query[:, None, None, :, :, None] * keys).sum(-1)
    return dots.permute(0, 1, 3, 4, 2, 5).flatten(-2)  # from [S, P, Wp, Hk, G, BS]


def weighted(
    weights: Tensor, cache: Tensor, blocks: Tensor, visible: Tensor, block_size: int, layout: Layout
) -> Tensor:
    """Returns sums of values ``[S, P, Hk, G, D]`` by weights ``[S, P, Hk, G, Wp * block_size]``.

    Values that are not ``visible [S, P, Wp * block_size]`` may be NaN, and 0 * NaN is NaN.
    """
    if not torch.compiler.is_compiling():
        values = _dense(cache, blocks, block_size, layout, weights.dtype, is_key=False)
        hidden = visible.logical_not()[:, :, None, :, None]
        return torch.matmul(weights, values.masked_fill_(hidden, 0))
    gathered = _by_block(cache, block_size, layout)[blocks]
    visible = visible.unflatten(-1, (-1, block_size))  # [S, P, Wp, BS]
    weights = weights.unflatten(-1, (-1, block_size))  # [S, P, Hk, G, Wp, BS]
    if layout == "packed":
        values = torch.where(visible[:, :, :, None, None], gathered.to(weights.dtype), 0)
        values = values.transpose(2, 3).unsqueeze(3)  # [S, P, Hk, 1, Wp, D, BS]
        return (weights.unsqueeze(-2) * values).sum((-3, -1))
    values = _heads_first(gathered, layout)
    values = torch.where(visible[:, :, :, None, :, None], values.to(weights.dtype), 0)
    values = values.transpose(2, 3).unsqueeze(3)
    products = weights.unsqueeze(-1) * values  # [S, P, Hk, G, Wp, BS, D]
    if layout != "HND" and _is_small(weights.shape[3], block_size, cache):
        return products.sum(-2).sum(-2)  # block by block: over twice as fast in float32
    return products.sum((-3, -2))


def _packed_scores(query: Tensor, keys: Tensor) -> Tensor:
    """``[S, P, Wp, Hk, G, BS]`` from keys ``[S, P, Wp, Hk, D/x, BS, x]``.

    The query is expanded to the layout of the keys, D/x rows of BS * x, so that the inner loop is
    contiguous on both sides, unless that would store too much.
    """
    (group, dim), (size, x) = query.shape[-2:], keys.shape[-2:]
    split: Tensor = query.unflatten(-1, (-1, 1, x))
    few_blocks = not _is_small(group, keys.shape[1] * keys.shape[2], keys)
    if few_blocks or not _is_small(group * x, dim, keys):
        products = split[:, None, None] * keys.unsqueeze(4).to(query.dtype)
        return products.sum((-3, -1))
    spread = split.expand(-1, -1, -1, -1, size, -1).flatten(-2)
    # `as_strided` is a no-op, but makes the compiler store its input: recomputed in the loop, the
    # expanded query needs an index calculation that does not vectorise (3x slower).
    spread = torch.as_strided(spread, spread.shape, spread.stride())
    rows = keys.flatten(-2).unsqueeze(4).to(query.dtype)  # [S, P, Wp, Hk, 1, D/x, BS * x]
    sums: Tensor = (spread[:, None, None] * rows).sum(-2).unflatten(-1, (size, x))
    return sums.sum(-1)


def _is_small(floats: int, elements: int, cache: Tensor) -> bool:
    """Whether ``floats`` float32 take at most half the memory of ``elements`` of the cache."""
    return 2 * 4 * floats <= elements * cache.dtype.itemsize


def _dense(
    cache: Tensor, blocks: Tensor, size: int, layout: Layout, dtype: torch.dtype, *, is_key: bool
) -> Tensor:
    """Copies the tokens of blocks by head, ``[S, P, Hk, N, D]``."""
    nhd = take_blocks(cache, blocks.flatten(), layout, size, is_key=is_key)
    tokens: Tensor = nhd.unflatten(0, blocks.shape).flatten(2, 3).transpose(2, 3)
    return tokens.to(dtype, memory_format=torch.contiguous_format)


def _by_block(cache: Tensor, block_size: int, layout: Layout) -> Tensor:
    return cache.unflatten(0, (-1, block_size)) if layout == "flat" else cache


def _heads_first(gathered: Tensor, layout: Layout) -> Tensor:
    """Reshapes gathered blocks to ``[S, P, Wp, Hk, BS, D]``."""
    return gathered if layout == "HND" else gathered.transpose(3, 4)
