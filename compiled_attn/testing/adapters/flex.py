"""FlexAttention over pages, with torch's own `PagedAttention`: eager, and compiled.

Source: ``torch.nn.attention.experimental._paged_attention``, used as torch's tests of it do: a mask
of logical blocks is converted to one of pages, and so is the function of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.adapters import package
from compiled_attn.testing.capabilities import Capabilities
from graphs.torch_internals.paged_flex import PAGED_FLEX

__all__ = ["CAPABILITIES", "compiled", "flash_attn_with_kvcache"]

CAPABILITIES = Capabilities(
    features=frozenset({
        "chunked", "shared_prefix", "window", "softcap", "alibi", "noncausal", "append",
        "empty_rows",
    }),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    head_dims=(16, 64, 128),
    block_sizes=(16, 32, 128),
)  # fmt: skip
_INSTALL = "use a torch that has FlexAttention"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attention: Callable[..., Any] | None = None,
) -> Tensor:
    """Computes FlashAttention's function over pages, in eager mode: the whole cache is read.

    Args:
        attention: called instead of ``flex_attention``, such as a compiled one.
    """
    flex = package("torch.nn.attention.flex_attention", _INSTALL)
    queries, size = q.shape[1], k_cache.shape[1]
    lengths = cache_seqlens.long() + (0 if k is None else k.shape[1])
    pages = _pages(block_table, lengths, len(k_cache), size)
    rows = torch.arange(len(q), device=q.device)
    # [NP, P, Hk, D] -> [1, Hk, NP * P, D]
    caches = [each.flatten(0, 1).transpose(0, 1).unsqueeze(0) for each in (k_cache, v_cache)]
    if k is not None and v is not None:
        at = cache_seqlens.long()[:, None] + torch.arange(k.shape[1], device=q.device)
        pages.assign(rows, at, k.transpose(1, 2), v.transpose(1, 2), *caches)
    first = lengths - queries
    left, right = window_size[0], 0 if causal else window_size[1]

    def is_visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position, seen = first[b] + query, key < lengths[b]
        seen = seen & (key >= position - left) if left >= 0 else seen
        return seen & (key <= position + right) if right >= 0 else seen

    def modified(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = softcap * torch.tanh(score / softcap) if softcap else score
        if alibi_slopes is None:
            return score
        return score - alibi_slopes[h] * (first[b] + query - key).abs()

    keys = pages.page_table.shape[1] * size
    blocks = flex.create_block_mask(
        is_visible, len(q), None, queries, keys, q.device, BLOCK_SIZE=(128, size)
    )
    out: Tensor = (attention or flex.flex_attention)(
        q.transpose(1, 2), *caches, pages.get_score_mod(modified, lengths),
        pages.convert_logical_block_mask(blocks, kv_len=lengths), softmax_scale,
        q.shape[2] != k_cache.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def compiled(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Computes the same with a compiled ``flex_attention``, compiled anew for each shape."""
    return flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, attention=_compiled,
    )  # fmt: skip


def _compiled(*args: Any) -> Tensor:
    flex = package("torch.nn.attention.flex_attention", _INSTALL)
    attention: Callable[..., Tensor] = torch.compile(
        flex.flex_attention, dynamic=False, fullgraph=True
    )
    try:
        return attention(*args)
    except Exception as error:  # of a private class: so many shapes were compiled
        if type(error).__name__ != "FailOnRecompileLimitHit":
            raise
    torch.compiler.reset()
    return attention(*args)


def _pages(block_table: Tensor, lengths: Tensor, count: int, size: int) -> Any:
    """Torch's pages with the blocks of a table instead of reserved ones."""
    module = package(PAGED_FLEX, _INSTALL)
    table = block_table[:, :count].long()
    pages = module.PagedAttention(count, size, len(table), device=str(table.device))
    logical = torch.arange(table.shape[1], device=table.device).expand_as(table)
    row, block = (logical < -(-lengths // size)[:, None]).nonzero(as_tuple=True)
    pages.page_table = torch.zeros_like(table)
    pages.page_table[row, block] = table[row, block]
    pages.physical_to_logical[row, table[row, block]] = block
    return pages
