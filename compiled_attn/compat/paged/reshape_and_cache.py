"""Writes new tokens to a paged cache in place, without a copy of the cache in compiled graphs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from compiled_attn.arguments import FLOATS, INTS, can_read, slot_used_twice
from compiled_attn.compat.paged.inputs import Scale, encode
from compiled_attn.compat.paged.layouts import Layout, axes, expect, packing
from compiled_attn.compat.paged.validation import check_caches
from compiled_attn.ops.rows import cells, write_rows

__all__ = ["reshape_and_cache"]

_SLOT_AXIS: Mapping[Layout, int] = MappingProxyType({"flat": 0, "NHD": 1, "HND": 2, "packed": 3})
"""The axis of slots. Blocks are the first axis, except in flat."""


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    *,
    layout: Layout = "packed",
) -> None:
    """Writes new tokens to their slots of both caches, in place.

    Args:
        key, value: ``(T', Hk, D)`` with ``T' >= T``, rows past T are padding. float16, bfloat16,
            float32 or float64.
        key_cache, value_cache: as in `paged_attention_v1`.
        slot_mapping: ints ``(T,)``, slot ``block * BS + offset`` of each token; a token with a
            negative slot is padding and is not written. Several tokens may have slot 0, the slot of
            padding in a padded step; which of them is written is unspecified.
        kv_cache_dtype, k_scale, v_scale: as in `paged_attention_v1`; tokens are divided by the
            scale, rounded, and saturated at the largest element.
        layout: of both caches, see `Layout`.

    Raises:
        PagedArgumentError: arguments do not match, a token or ``slot_mapping`` shares memory with a
            cache, a slot is beyond the cache, or two tokens have one slot (other than 0); both
            caches are unchanged. Slots are not checked inside a compiled or captured graph; there a
            token with a slot beyond the cache is not written.
        TypeError: an argument is not a tensor.

    Source: ``reshape_and_cache`` and (NHD) ``reshape_and_cache_flash`` of vLLM.
    """
    expect.tensor("key", key, "(T, Hk, D)", (None, None, None), FLOATS)
    expect.tensor("value", value, "like key", key.shape, (key.dtype,), key)
    expect.tensor("slot_mapping", slot_mapping, "(T,)", (None,), INTS, key)
    sizes = tokens, given = slot_mapping.shape[0], key.shape[0]
    expect(tokens <= given, "a slot_mapping no longer than key", sizes, "cut it")
    rank = axes(layout, is_key=False)
    expect.tensor("value_cache", value_cache, f"in layout {layout}", (None,) * rank)
    num_blocks = value_cache.shape[0]
    block_size = 1 if layout == "flat" else value_cache.shape[_SLOT_AXIS[layout]]
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    shape, scales = (num_blocks, block_size, *key.shape[1:]), (k_scale, v_scale)
    check_caches(caches, shape, kv_cache_dtype, scales, layout, key)
    expect.not_expanded(*caches.values())
    # Keys are written before values are read.
    expect.apart(caches, {"key": key, "value": value, "slot_mapping": slot_mapping})
    num_slots = num_blocks * block_size
    if can_read(key):
        _check_slots(slot_mapping, num_slots)
    if tokens == 0 or num_slots == 0:
        return
    valid = (slot_mapping >= 0) & (slot_mapping < num_slots)
    # A padded token repeats a real one, the same row to the same slot, so that every index is in
    # range and no other slot changes. Without a real token, slot 0 is rewritten with its content.
    source = torch.where(valid, torch.arange(tokens, device=valid.device), valid.int().argmax())
    slots = torch.where(valid, slot_mapping, slot_mapping[source]).clamp(min=0, max=num_slots - 1)
    at = slots // block_size, slots % block_size, _SLOT_AXIS[layout]
    for cache, new, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        rows = encode(new.detach()[:tokens], kv_cache_dtype, scale, cache)[source]
        rows = rows.unflatten(-1, (-1, packing(cache.dtype))) if cache.dim() == 5 else rows
        block, slot, axis = at
        written = torch.where(valid.any(), rows, cache[cells(*at)])
        write_rows(cache, block, slot, written, axis)


def _check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    used = slot_mapping[slot_mapping >= 0]
    if used.numel() == 0:
        return
    largest = int(used.max())
    expected = f"slots below {num_slots}, the size of the cache"
    expect(largest < num_slots, expected, largest, "check the block tables")
    twice = slot_used_twice(used[used > 0])
    remedy = "give each token its own slot, and padding a negative one"
    expect(twice is None, "every token in a slot of its own", f"slot {twice} twice", remedy)
