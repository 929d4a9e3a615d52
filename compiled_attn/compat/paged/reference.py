"""The definition of paged attention, one row at a time: the oracle of every faster form."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.attention.dense import attend
from compiled_attn.attention.merge import merge
from compiled_attn.compat.paged.layouts import Layout, take_blocks
from compiled_attn.compat.paged.scales import Scale, per_head, stored

__all__ = ["paged_attention_reference"]


@torch.no_grad()
def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    *,
    layout: Layout = "packed",
) -> Tensor:
    """`paged_attention_v1` in its plainest form, without checks; returns ``(num_seqs, H, D)``.

    Arguments as in `paged_attention_v1`.
    """
    keys, values = stored(key_cache, kv_cache_dtype), stored(value_cache, kv_cache_dtype)
    out = torch.zeros_like(query)
    for row, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        blocks = block_tables[row, : -(-length // block_size)].long()
        key, value = (
            take_blocks(cache, blocks, layout, block_size, is_key=is_key).flatten(0, 1)[:length]
            for cache, is_key in ((keys, True), (values, False))
        )
        key, value = _real(key, kv_cache_dtype, k_scale), _real(value, kv_cache_dtype, v_scale)
        bias = _bias(alibi_slopes, length, key)
        part = attend(query[row].unsqueeze(0), key, value, bias, scale=scale)
        out[row] = merge(part)[0].to(out.dtype)
    return out


def _real(tokens: Tensor, kv_cache_dtype: str, scale: Scale) -> Tensor:
    if kv_cache_dtype == "auto":
        return tokens
    return tokens.float() * per_head(scale, tokens.device).unsqueeze(-1)


def _bias(slopes: Tensor | None, length: int, like: Tensor) -> Tensor:
    """ALiBi of the newest token, ``[H, 1, length]`` or ``[1, length]``: 0 for itself."""
    ages = torch.arange(1 - length, 1, device=like.device)
    return ages.new_zeros(1, length).float() if slopes is None else slopes[:, None, None] * ages
