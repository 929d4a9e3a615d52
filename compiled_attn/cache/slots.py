"""Slots of a flat cache: rows written in place, blocks read, and what is hidden in them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_attn.cache.quantisation import QUANTISED, dequantise, quantise

__all__ = [
    "gather_blocks",
    "read_blocks",
    "slots_of",
    "strict_index",
    "usage_bias",
    "write_slots",
]


def write_slots(cache: Tensor, new: Tensor, slots: Tensor, scale: Tensor | None) -> Tensor:
    """Writes rows ``[T, Hk, D]`` to slots ``[T]`` of a flat cache, in place.

    Returns:
        The rows as they will be read: of the cache's dtype, or dequantised to float32.
    """
    # index_copy_: inside a captured graph it writes T rows and does not copy the cache.
    slots = strict_index(slots.long(), cache.shape[0])
    if cache.dtype not in QUANTISED or scale is None:
        kept = new.to(cache.dtype)
        cache.index_copy_(0, slots, kept)
        return kept
    codes, row_scales = quantise(new, cache.dtype)
    # There is no index_copy_ of float8: its bytes are copied.
    cache.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
    scale.index_copy_(0, slots, row_scales)
    return dequantise(codes, row_scales)


def usage_bias(usage: Tensor, block_size: int) -> Tensor:
    """0 for the first ``usage`` slots of a block, else -inf: ``[...] -> [..., block_size]``."""
    visible = slots_of(block_size, usage) < usage.unsqueeze(-1)
    return torch.where(visible, 0.0, -math.inf)


def gather_blocks(
    cache: Tensor, blocks: Tensor, used: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Blocks of a flat cache as ``[B, block_size, Hk, D]``, with zeros in unused slots.

    Args:
        cache: ``[num_blocks * block_size, Hk, D]``.
        blocks: ``[B]`` ids.
        used: ``[B, block_size]`` bool. What lies in other slots may be NaN, and 0 * NaN is NaN.
        scale: ``[num_blocks * block_size, Hk]`` of a quantised cache, or None.
    """
    read = read_blocks(cache, blocks, used.shape[-1], scale)
    return torch.where(used[:, :, None, None], read, 0)


def read_blocks(
    cache: Tensor, blocks: Tensor | int, block_size: int, scale: Tensor | None = None
) -> Tensor:
    """Blocks as they are, garbage included: ``[B, block_size, Hk, D]``, float32 if quantised.

    Args:
        cache, scale: as in `gather_blocks`.
        blocks: ``[B]`` ids, or an int B: the first B blocks, without a gather.
        block_size: slots in a block.
    """
    by_block = cache.unflatten(0, (-1, block_size))
    at = slice(blocks) if isinstance(blocks, int) else strict_index(blocks, by_block.shape[0])
    read = by_block[at]
    return read if scale is None else dequantise(read, scale.unflatten(0, (-1, block_size))[at])


def strict_index(ids: Tensor, limit: int) -> Tensor:
    """Ids for indexing, negative ones made ``limit``: where a graph cannot read them to refuse
    them, indexing by -1 would take the last element in silence, but by ``limit`` it fails.
    """
    return torch.where(ids < 0, limit, ids)


def slots_of(block_size: int, like: Tensor) -> Tensor:
    """``[0, 1, .. block_size - 1]`` on a tensor's device."""
    return torch.arange(block_size, device=like.device)
