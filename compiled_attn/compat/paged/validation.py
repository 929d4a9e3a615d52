"""Validates the arguments of a call: shapes, dtypes, devices, numbers, then index tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_attn.arguments import FLOATS, INTS, can_read
from compiled_attn.compat.paged.block_tables import lost_rows, unknown_blocks
from compiled_attn.compat.paged.inputs import DecodeCall, Scale, check_scale, element_type
from compiled_attn.compat.paged.layouts import Layout, axes, expect, key_shape, value_shape

__all__ = ["check", "check_caches"]


def check(call: DecodeCall, **written: Tensor) -> list[int] | None:
    """Validates the arguments.

    Args:
        written: tensors that the call writes, which must not share memory with its indices.

    Returns:
        The numbers in ``seq_lens``, or None if they cannot be read and so were not checked.

    Raises:
        PagedArgumentError: shapes, dtypes, devices or numbers do not match.
        TypeError: an argument is not a tensor or int.
    """
    query = call.query
    expect.tensor("query", query, "(num_seqs, H, D)", (None, None, None), FLOATS)
    for name in ("num_kv_heads", "block_size", "max_seq_len"):
        _expect_int(name, getattr(call, name), 0 if name == "max_seq_len" else 1)
    expect.number("scale", call.scale)
    seqs, heads, dim = query.shape
    kv_heads = call.num_kv_heads
    expect(dim > 0, "a head dim of at least 1", dim, "check the shape of query")
    expect.heads(heads, kv_heads, "num_kv_heads")
    rank = axes(call.layout, is_key=True)
    expect.tensor("key_cache", call.key_cache, f"in layout {call.layout}", (None,) * rank)
    caches = {"key_cache": call.key_cache, "value_cache": call.value_cache}
    sizes, scales = (call.num_blocks, call.block_size, kv_heads, dim), (call.k_scale, call.v_scale)
    check_caches(caches, sizes, call.kv_cache_dtype, scales, call.layout, query)
    tables = call.block_tables
    expect.tensor("block_tables", tables, "(num_seqs, W)", (seqs, None), INTS, query)
    expect.tensor("seq_lens", call.seq_lens, "(num_seqs,)", (seqs,), INTS, query)
    if call.alibi_slopes is not None:
        expect.tensor("alibi_slopes", call.alibi_slopes, "(H,)", (heads,), FLOATS, query)
    lengths = _check_numbers(call) if can_read(query) else None
    expect.apart(written, {"block_tables": tables, "seq_lens": call.seq_lens})
    return lengths


def check_caches(
    caches: Mapping[str, Tensor],
    sizes: tuple[int, ...],
    kv_cache_dtype: str,
    scales: tuple[Scale, Scale],
    layout: Layout,
    like: Tensor,
) -> None:
    """Checks layout, sizes (NB, BS, Hk, D), dtype and scales of both caches."""
    blocks, size, heads, dim = sizes
    dtype = element_type(kv_cache_dtype, like.dtype)
    dtypes = (dtype, torch.uint8) if kv_cache_dtype.startswith("fp8") else (dtype,)
    key = key_shape(layout, blocks, size, heads, dim, dtype)
    shapes = key, value_shape(layout, blocks, size, heads, dim)
    for (name, cache), shape in zip(caches.items(), shapes, strict=True):
        expect.tensor(name, cache, f"in layout {layout}", shape, dtypes, like)
    if kv_cache_dtype != "auto":
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            check_scale(name, scale, heads, like.device)


def _expect_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}: pass a plain number")
    expect(value >= least, f"{name} of at least {least}", value, "check the sizes of the cache")


def _check_numbers(call: DecodeCall) -> list[int]:
    flags: list[int] = torch.cat([call.seq_lens, lost_rows(call).to(call.seq_lens.dtype)]).tolist()
    lengths, lost = flags[: len(flags) // 2], flags[len(flags) // 2 :]
    if any(lost):
        _explain_lost(call, lost.index(1))
    return lengths


def _explain_lost(call: DecodeCall, row: int) -> None:
    length, fits = int(call.seq_lens[row]), call.capacity
    table = f"block_tables has {call.block_tables.shape[1]} columns of {call.block_size}"
    expected = f"seq_lens[{row}] in 0 .. {fits} ({table}, max_seq_len is {call.max_seq_len})"
    expect(0 <= length <= fits, expected, length, "widen the table or raise max_seq_len")
    column = int(unknown_blocks(call)[row].nonzero()[0])
    expected = f"block_tables[{row}, {column}] in 0 .. {call.num_blocks - 1}"
    remedy = f"the row's {length} tokens need it, so give it a block of the cache"
    expect(False, expected, int(call.block_tables[row, column]), remedy)
