"""Writing the new tokens of a step to a flat cache in place; captured graphs copy nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.attention.cached_blocks import strict_index
from compiled_attn.attention.call import UnifiedCall
from compiled_attn.cache.quantisation import QUANTISED, dequantise, quantise

__all__ = ["write_step"]


def write_step(call: UnifiedCall) -> tuple[Tensor, Tensor]:
    """Writes the keys and values of a call; returns them as a later step will read them, of the
    cache's dtype or dequantised to float32.
    """
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
