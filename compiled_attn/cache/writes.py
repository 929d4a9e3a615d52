"""Writing new tokens to a flat cache in place; inside a captured graph nothing else is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.attention.cached_blocks import strict_index
from compiled_attn.attention.call import UnifiedCall
from compiled_attn.cache.quantisation import QUANTISED, dequantise, quantise
from compiled_attn.ops.overlap import expect_apart

__all__ = ["write_cache", "write_step"]


def write_cache(
    cache: Tensor, new: Tensor, slot_mapping: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Writes rows of ``new [T, Hk, D]`` to ``cache [slots, Hk, D]`` in place, at ``slot_mapping
    [T]``.

    Args:
        cache: any float dtype; with ``scale [slots, Hk]`` one of `QUANTISED`.
        new, slot_mapping, scale: see `unified_attention`.

    Returns:
        The rows as a later step will read them: of the cache's dtype, or dequantised to float32.

    Raises:
        ValueError: new rows or slots lie in the memory of the cache or its scale.
    """
    read = {"new": new, "slot_mapping": slot_mapping}
    expect_apart({"cache": cache, "scale": scale}, read, ValueError)
    return _write(cache, new, slot_mapping, scale)


def write_step(call: UnifiedCall) -> tuple[Tensor, Tensor]:
    """Writes the keys and values of a call; returns them as the cache keeps them."""
    slots = call.metadata.slot_mapping
    key = _write(call.key_cache, call.key, slots, call.key_scale)
    if call.value is None or call.value_cache is None:  # a part of the keys, written with them
        return key, key[..., : call.latent]
    return key, _write(call.value_cache, call.value, slots, call.value_scale)


def _write(cache: Tensor, new: Tensor, slot_mapping: Tensor, scale: Tensor | None) -> Tensor:
    # index_copy_: inside a captured graph it writes T rows and does not copy the cache.
    slots = strict_index(slot_mapping.long(), cache.shape[0])
    if cache.dtype not in QUANTISED or scale is None:
        kept = new.to(cache.dtype)
        cache.index_copy_(0, slots, kept)
        return kept
    codes, row_scales = quantise(new, cache.dtype)
    # There is no index_copy_ of float8: its bytes are copied.
    cache.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
    scale.index_copy_(0, slots, row_scales)
    return dequantise(codes, row_scales)
