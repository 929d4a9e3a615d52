"""What paged attention must compute, in float64: one function for each interface.

Each has the arguments of its interface and shares no code with the library: it reads the caches
token by token, in plain loops, and attends with the one function
`compiled_attn.testing.dense.attend`. They are slow, run for tensors of any device, and return
tensors on the CPU. With ``dtype`` they compute in another precision than float64: what plain torch
makes of the same inputs, from which tolerances are derived.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.dense import attend, distances, position_bias, read, rotate, write

__all__ = [
    "flash_attn_with_kvcache",
    "paged_attention",
    "paged_attention_",
    "paged_attention_v1",
    "paged_attention_v2",
    "unified_attention",
    "varlen_attn",
]


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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Reference of `compiled_attn.ops.reference.paged_attention`; returns out and lse on the CPU.

    Request r has the query rows ``query_start_loc[r] .. query_start_loc[r + 1]``, the last ones of
    its ``seq_lens[r]`` tokens. Rows of no request are zero.
    """
    query, (tokens, heads, _) = query.cpu(), query.shape
    slopes, sinks = (None if each is None else each.cpu() for each in (alibi_slopes, sinks))
    out = torch.zeros(tokens, heads, value_cache.shape[-1], dtype=dtype)
    lse = torch.full((tokens, heads), -math.inf, dtype=dtype)
    if sinks is not None:
        lse[:] = sinks
    starts = query_start_loc.tolist()
    left, right = None if window is None else window - 1, 0 if causal else None
    for request, length in enumerate(seq_lens.tolist()):
        rows, blocks = slice(starts[request], starts[request + 1]), block_table[request].tolist()
        key = read(key_cache, blocks, 0, length, key_scale)
        value = read(value_cache, blocks, 0, length, value_scale)
        bias = position_bias(distances(rows.stop - rows.start, length), left, right, slopes)
        out[rows], lse[rows] = attend(
            query[rows], key, value, bias, scale=scale, softcap=softcap, sinks=sinks, dtype=dtype
        )
    return out, lse


def paged_attention_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Writes new keys and values ``[T, Hk, D]`` at their slots, then computes `paged_attention`."""
    write(key_cache, key, slot_mapping.tolist(), key_scale)
    write(value_cache, value, slot_mapping.tolist(), value_scale)
    return paged_attention(
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale,
        key_scale=key_scale, value_scale=value_scale, **options,
    )  # fmt: skip


def unified_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    scale: float,
    metadata: Any,
    *,
    sliding_window: int | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    value_projection: Tensor | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Reference of `compiled_attn.unified_attention`, from the metadata's table layout alone."""
    size, slots = metadata.block_size, metadata.slot_mapping.tolist()

    def blocks(flat: Tensor | None) -> Tensor | None:
        return None if flat is None else flat.unflatten(0, (-1, size))

    keys, key_scale, value_scale = blocks(key_cache), blocks(key_scale), blocks(value_scale)
    assert keys is not None
    write(keys, key, slots, key_scale)
    values = blocks(value_cache)
    if values is None or value is None:  # a part of the keys
        width = None if value_projection is None else value_projection.shape[1]
        values, value_scale = keys[..., :width], key_scale
    else:
        write(values, value, slots, value_scale)
    out, lse = paged_attention(
        query, keys, values, metadata.block_tables, metadata.seq_lens, metadata.query_start_loc,
        scale, window=sliding_window, key_scale=key_scale, value_scale=value_scale, dtype=dtype,
        **options,
    )  # fmt: skip
    if value_projection is not None:
        out = torch.einsum("thr,hrv->thv", out, value_projection.to("cpu", dtype))
    return out, lse


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = True,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Reference of FlashAttention's function: out ``[B, Sq, H, D]`` and lse ``[B, H, Sq]``.

    Writes k and v to the caches, then attends row by row. Queries are the last tokens of their
    row. Without a block table a row of the cache is one block.
    """
    size, count = k_cache.shape[1], q.shape[1]
    left, right = (None if side < 0 else side for side in window_size)
    right = 0 if causal else right
    outs, sums = [], []
    for b in range(len(q)):
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        blocks = [row] if block_table is None else block_table[row].tolist()
        length = len(blocks) * size if cache_seqlens is None else cache_seqlens
        length = int(length[b]) if isinstance(length, Tensor) else length
        total, query = length, q[b].cpu()
        if k is not None and v is not None:
            total += k.shape[1]
            new = [*range(length, total)]
            key = k[b]
            if rotary_cos is not None and rotary_sin is not None:
                tables = rotary_cos, rotary_sin, rotary_interleaved
                turns = causal or window_size != (-1, -1)
                at = [length + i * turns for i in range(count)]
                query = rotate(query, at, *tables).to(q.dtype)
                key = rotate(key, new, *tables).to(q.dtype)
            slots = [blocks[position // size] * size + position % size for position in new]
            write(k_cache, key, slots)
            write(v_cache, v[b], slots)
        start = 0 if cache_leftpad is None else int(cache_leftpad[b])
        keys, values = (read(cache, blocks, start, total) for cache in (k_cache, v_cache))
        away = distances(count, total - start)
        bias = position_bias(away, left, right)
        if alibi_slopes is not None:
            slopes = (alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]).double().cpu()
            bias = bias - slopes[:, None, None] * away.abs()
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = attend(query, keys, values, bias, scale=scale, softcap=softcap, dtype=dtype)
        outs.append(out)
        sums.append(lse.T)
    return torch.stack(outs), torch.stack(sums)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Reference of ``torch.nn.attention.varlen.varlen_attn``: out ``[T, H, D]``, lse ``[T, H]``.

    With a block table key and value are pages ``[num_blocks, block_size, Hk, D]``, else packed
    ``[Tk, Hk, D]``, request r from ``cu_seq_k[r]`` on.
    """
    query, starts = query.cpu(), cu_seq_q.tolist()
    first = [0] * len(starts) if cu_seq_k is None else cu_seq_k.tolist()
    left, right = (None if side < 0 else side for side in window_size)
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=dtype)
    lse = torch.full(query.shape[:2], -math.inf, dtype=dtype)
    for request in range(len(starts) - 1):
        rows = slice(starts[request], starts[request + 1])
        length = first[request + 1] - first[request]
        length = length if seqused_k is None else int(seqused_k[request])
        if block_table is None:  # blocks of one token
            blocks = [*range(first[request], first[request] + length)]
            caches = key.unsqueeze(1), value.unsqueeze(1)
        else:
            blocks, caches = block_table[request].tolist(), (key, value)
        keys, values = (read(cache, blocks, 0, length) for cache in caches)
        bias = position_bias(distances(rows.stop - rows.start, length), left, right)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        out[rows], lse[rows] = attend(query[rows], keys, values, bias, scale=factor, dtype=dtype)
    return out, lse


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
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | float = 1.0,
    v_scale: Tensor | float = 1.0,
    *_: Any,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Reference of vLLM's decode kernel; returns ``[num_seqs, H, D]`` and leaves ``out`` alone.

    Element d of the key in slot t of a block is at ``[block, head, d // x, t, d % x]``, that of the
    value at ``[block, head, d, t]``. The query is the last of its request's tokens.
    """
    fp8 = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
    is_bytes = key_cache.dtype == torch.uint8
    keys, values = (each.view(fp8) if is_bytes else each for each in (key_cache, value_cache))
    keys, values = keys.permute(0, 3, 1, 2, 4).flatten(3), values.permute(0, 3, 1, 2)
    scales: list[Tensor | None] = [None, None]
    if kv_cache_dtype != "auto":
        shape = keys.shape[:3]
        scales = [torch.as_tensor(each).cpu().double().expand(shape) for each in (k_scale, v_scale)]
    return paged_attention(
        query, keys, values, block_tables, seq_lens, torch.arange(len(query) + 1), scale,
        alibi_slopes=alibi_slopes, key_scale=scales[0], value_scale=scales[1], dtype=dtype,
    )[0]  # fmt: skip


def paged_attention_v2(
    out: Tensor, exp_sum: Tensor, max_logits: Tensor, tmp_out: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Reference of vLLM's decode kernel by partitions: the same as `paged_attention_v1`."""
    return paged_attention_v1(out, *args, **options)
