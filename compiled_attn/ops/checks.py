"""What must hold of the arguments of the ops; C++ checks the same in ``csrc/op.cpp``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_attn.cache.quantisation import QUANTISED
from compiled_attn.ops.errors import KernelArgumentError
from compiled_attn.ops.overlap import expect_apart

__all__ = ["check_apart", "check_attention", "check_numbers", "check_write"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    causal: bool,
    window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Raises KernelArgumentError unless shapes, dtypes and options of `paged_attention` fit."""
    _rank("query", query, 3, "[T, H, D]")
    _rank("key_cache", key_cache, 4, "[num_blocks, block_size, Hk, D]")
    _expect(query.dtype in _FLOATS, "query: a float dtype", query.dtype, "convert it with .to()")
    blocks, size, kv_heads, _ = key_cache.shape
    heads, dim = query.shape[1:]
    fits = kv_heads > 0 and heads > 0 and heads % kv_heads == 0
    _expect(fits, "H to be a multiple of Hk", (heads, kv_heads), "check the heads of the cache")
    _shape("key_cache", key_cache, (blocks, size, kv_heads, dim), query)
    _shape("value_cache", value_cache, (blocks, size, kv_heads, None), query)
    smallest = min(size, dim, value_cache.shape[3])
    got = tuple(key_cache.shape)
    _expect(smallest > 0, "heads and blocks of at least one element", got, "give them a size")
    quantised = key_cache.dtype in QUANTISED
    for name, cache, scale in (("key", key_cache, key_scale), ("value", value_cache, value_scale)):
        wanted = key_cache.dtype if quantised else query.dtype
        _dtype(f"{name}_cache", cache, wanted)
        given = "a tensor" if scale is not None else "None"
        remedy = "scales belong to int8 and fp8 caches, and to no others"
        _expect((scale is not None) == quantised, f"{name}_scale for {wanted}", given, remedy)
        if scale is not None:
            _shape(f"{name}_scale", scale, (blocks, size, kv_heads), query)
            _dtype(f"{name}_scale", scale, torch.float32)
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        _expect(dense, f"{name}: last stride 1", tensor.stride(), "call .contiguous()")
    _rank("block_table", block_table, 2, "[R, W]")
    requests = block_table.shape[0]
    _shape("seq_lens", seq_lens, (requests,), query)
    _shape("query_start_loc", query_start_loc, (requests + 1,), query)
    for name, ints in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        _dtype(name, ints, torch.int32)
    for name, vector in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if vector is not None:
            _shape(name, vector, (heads,), query)
            _dtype(name, vector, torch.float32)
    if window is not None:
        _expect(causal, "causal=True with a window", causal, "None is no window")
        _expect(window >= 1, "window of at least 1", window, "None is no window")
    positive = softcap is None or softcap > 0
    _expect(positive, "a positive softcap or None", softcap, "None is no softcap")


def check_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
) -> None:
    """The same for what `paged_attention_` has besides."""
    tokens, kv_heads = query.shape[0], key_cache.shape[2]
    _shape("key", key, (tokens, kv_heads, query.shape[2]), query)
    _shape("value", value, (tokens, kv_heads, value_cache.shape[3]), query)
    for name, new in (("key", key), ("value", value)):
        _dtype(name, new, query.dtype)
        dense = new.stride(-1) == 1 or new.shape[-1] == 1
        _expect(dense, f"{name}: last stride 1", new.stride(), "call .contiguous()")
    _shape("slot_mapping", slot_mapping, (tokens,), query)
    _dtype("slot_mapping", slot_mapping, torch.int64)
    both = (cos is None) == (sin is None)
    _expect(both, "cos and sin both or neither", "one of them", "pass the other too")
    if cos is not None and sin is not None:
        _rank("cos", cos, 2, "[T, rot / 2]")
        _shape("cos", cos, (tokens, None), query)
        _shape("sin", sin, tuple(cos.shape), query)
        for name, table in (("cos", cos), ("sin", sin)):
            _dtype(name, table, torch.float32)
        fits = 2 * cos.shape[1] <= query.shape[2]
        _expect(fits, f"at most {query.shape[2] // 2} angles", cos.shape[1], "cut the tables")


def check_apart(read: Mapping[str, Tensor], written: Mapping[str, Tensor | None]) -> None:
    """Raises KernelArgumentError where what is written shares memory with what is read."""
    expect_apart(written, read, KernelArgumentError, "paged_attention: ")


def check_numbers(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slot_mapping: Tensor | None = None,
) -> None:
    """Raises KernelArgumentError unless the numbers in the tensors are in range."""
    tokens, (blocks, size) = query.shape[0], key_cache.shape[:2]
    bounds, room = query_start_loc.tolist(), block_table.shape[1] * size
    for request, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[request], bounds[request + 1]
        _expect(
            0 <= begin <= end <= tokens,
            f"query rows of request {request} in 0..{tokens}, in order",
            f"{begin}..{end}",
            "query_start_loc is a running sum that ends at the tokens of the step",
        )
        _expect(
            0 <= length <= room,
            f"seq_lens[{request}] in 0..{room} ({block_table.shape[1]} blocks of {size})",
            length,
            "widen the block table",
        )
        used = block_table[request, : -(-length // size)]
        bad = ((used < 0) | (used >= blocks)).nonzero()
        if bad.numel():
            column = int(bad[0])
            _expect(
                False,
                f"block_table[{request}, {column}] in 0..{blocks - 1}",
                int(used[column]),
                "the request needs it: give it a block of the cache",
            )
    if slot_mapping is not None:
        lost = ((slot_mapping < 0) | (slot_mapping >= blocks * size)).nonzero()
        if lost.numel():
            token = int(lost[0])
            _expect(
                False,
                f"slot_mapping[{token}] in 0..{blocks * size - 1}",
                int(slot_mapping[token]),
                "padding points into block 0",
            )


def _rank(name: str, tensor: Tensor, rank: int, legend: str) -> None:
    _expect(tensor.dim() == rank, f"{name}: {legend}", list(tensor.shape), "check its shape")


def _shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], like: Tensor) -> None:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    fits = tensor.dim() == len(shape) and all(
        size is None or size == own for size, own in zip(shape, tensor.shape, strict=True)
    )
    _expect(fits, f"{name}: [{sizes}]", list(tensor.shape), "match the other arguments")
    same = tensor.device == like.device
    _expect(same, f"{name} on {like.device}", tensor.device, "move it with .to()")


def _dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    _expect(tensor.dtype == dtype, f"{name}: {dtype}", tensor.dtype, "convert it with .to()")


def _expect(holds: bool, expected: str, got: object, remedy: str) -> None:
    if not holds:
        raise KernelArgumentError(f"paged_attention: expected {expected}, got {got}: {remedy}")
