"""transformers' attention ``paged|eager``, as its continuous batching calls it.

Source: ``generation/continuous_batching`` of transformers 5.23 and later. Keys of all requests are
gathered from the cache into one row, under one block-diagonal mask. Soft caps are
claimed, as Gemma 2 passes one to it and the error of ``sdpa`` recommends ``eager`` for them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.adapters import package
from compiled_attn.testing.capabilities import Capabilities

__all__ = ["CAPABILITIES", "attend", "paged_attention"]

CAPABILITIES = Capabilities(
    features=frozenset({"chunked", "mixed", "shared_prefix", "window", "softcap", "sinks"}),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    head_dims=(16, 64, 80, 128),
    block_sizes=(16, 32, 256),
)

Forward = Callable[..., tuple[Tensor, Tensor | None]]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes ``torch.ops.compiled_attn.paged_attention`` without its log-sum-exp."""
    module = package("transformers.integrations.eager_paged", "pip install transformers")
    heads = {} if sinks is None else {"sinks": sinks.to(query.dtype)}
    return attend(
        module.eager_paged_attention_forward, query, key_cache, value_cache, block_table, seq_lens,
        query_start_loc, window=window, module=heads, scaling=scale, softcap=softcap,
    )  # fmt: skip


def attend(
    forward: Forward,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    window: int | None,
    module: dict[str, Tensor],
    **options: Any,
) -> Tensor:
    """Calls an attention function of transformers on a step that is read from a paged cache.

    Args:
        forward: the function; it gets the options too.
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, window: as in
            `compiled_attn.ops.reference.paged_attention`.
        module: attributes of the layer that calls it.

    Returns:
        ``[T, H, Dv]``.
    """
    utils = package("transformers.generation.continuous_batching.utils", "pip install transformers")
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    read = _slots(block_table, lengths, key_cache.shape[1])
    ends = [sum(lengths[:request]) for request in range(len(lengths) + 1)]
    mask = query.new_full((1, 1, len(query), len(read)), torch.finfo(query.dtype).min)
    utils.build_attention_mask(mask, starts, ends, 1 if window is None else window)
    groups = query.shape[1] // key_cache.shape[2]
    layer = SimpleNamespace(num_key_value_groups=groups, is_causal=False, **module)
    rows = (query, *(each.flatten(0, 1).index_select(0, read) for each in (key_cache, value_cache)))
    out, _ = forward(layer, *(each.transpose(0, 1).unsqueeze(0) for each in rows), mask, **options)
    return out[0]


def _slots(block_table: Tensor, lengths: list[int], size: int) -> Tensor:
    """Slots of all keys, request by request: what transformers calls the read index."""
    table = block_table.long()
    positions = [torch.arange(length, device=table.device) for length in lengths]
    slots = [row[at // size] * size + at % size for row, at in zip(table, positions, strict=True)]
    return torch.cat(slots)
