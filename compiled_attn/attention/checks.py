"""What must hold of the arguments of unified attention before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.numbers import check_numbers
from compiled_attn.attention.positions import check_window
from compiled_attn.cache.quantisation import QUANTISED
from compiled_attn.ops.overlap import expect_apart
from compiled_attn.ops.tracing import can_read

__all__ = ["check"]

_INTS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ANOTHER_BUCKET = "build the metadata and the tensors of a step with the same bucket"


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    m: UnifiedMetadata,
    sliding_window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    value_projection: Tensor | None,
) -> None:
    """Raises ValueError or TypeError unless the arguments of `unified_attention` fit together."""
    tokens, heads, dim = _shape(query, "query", "[T, H, D]")
    kv_heads = _shape(key, "key", "[T, Hk, D]")[1]
    if query.dtype not in _FLOATS:
        raise TypeError(
            f"query: expected one of {_FLOATS}, got {query.dtype}: convert it with .to()"
        )
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"expected H to be a multiple of Hk, got H={heads}, Hk={kv_heads}: "
            "repeat or split heads until each KV head serves as many query heads"
        )
    _expect("key", key, (tokens, kv_heads, dim), query)
    _check_cache("key_cache", key_cache, key_scale, key, m.block_size)
    if (value is None) != (value_cache is None):
        raise ValueError(
            "expected value and value_cache both (a cache with V) or neither (latents, without V), "
            f"got value {_given(value)} and value_cache {_given(value_cache)}: pass the other too"
        )
    if value is not None and value_cache is not None:
        _shape(value, "value", "[T, Hk, Dv]")
        _expect("value", value, (tokens, kv_heads, value.shape[-1]), query)
        _check_cache("value_cache", value_cache, value_scale, value, m.block_size)
        if value_cache.shape[0] != key_cache.shape[0]:
            raise ValueError(
                f"expected as many value slots as key slots, got {value_cache.shape[0]} "
                f"and {key_cache.shape[0]}: make both caches with the same number of blocks"
            )
    elif value_scale is not None:
        raise ValueError(
            "value_scale: expected None without value_cache, got a tensor: latents have key_scale"
        )
    for name, new in (("key", key), ("value", value)):
        if new is not None and new.dtype != query.dtype:
            raise TypeError(
                f"{name}: expected the query's {query.dtype}, got {new.dtype}: "
                "convert it with .to()"
            )
    for name, vector in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if vector is not None:
            _expect(name, vector, (heads,), query, "one number a query head")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap: expected a positive number, got {softcap}: None is no softcap")
    value_dim = dim if value is None else value.shape[-1]
    _check_projection(value_projection, heads, value_dim, may_be_less=value is None, like=query)
    _check_parts(m)
    _check_shapes(m, tokens, heads, query)
    _check_positions(m, tokens, sliding_window, alibi_slopes)
    _check_requests(m, query)
    if can_read(query):
        # First, since numbers that are written over after they were checked can be anything.
        caches = {"key_cache": key_cache, "value_cache": value_cache}
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        read = {"query": query, "key": key, "value": value, **vars(m)}
        expect_apart({**caches, **scales}, read, ValueError)
        check_numbers(m, tokens, key_cache.shape[0])


def _check_cache(
    name: str, cache: Tensor, scale: Tensor | None, new: Tensor, block_size: int
) -> None:
    slots = _shape(cache, name, "[num_blocks * block_size, Hk, D]")[0]
    _expect(name, cache, (slots, *new.shape[1:]), new)
    if block_size < 1 or slots % block_size:
        raise ValueError(
            f"{name}: expected a multiple of block_size {block_size} slots, got {slots}: "
            "the metadata was built for another cache"
        )
    if cache.dtype not in _FLOATS + QUANTISED:
        raise TypeError(
            f"{name}: expected one of {_FLOATS + QUANTISED}, got {cache.dtype}: "
            "make it with PagedKVCache"
        )
    scale_name = name.replace("cache", "scale")
    if (cache.dtype in QUANTISED) != (scale is not None):
        raise ValueError(
            f"expected {scale_name} with a cache of {QUANTISED} and with no other, got "
            f"{scale_name} {_given(scale)} with {cache.dtype}: "
            "pass PagedKVCache's caches and scales together"
        )
    if scale is not None:
        _expect(scale_name, scale, (slots, new.shape[1]), new)
        if scale.dtype != torch.float32:
            raise TypeError(
                f"{scale_name}: expected float32, got {scale.dtype}: "
                "make a quantised cache after the model's .to(dtype)"
            )


def _check_projection(
    projection: Tensor | None, heads: int, value_dim: int, *, may_be_less: bool, like: Tensor
) -> None:
    if projection is None:
        return
    _shape(projection, "value_projection", "[H, R, Dv]")
    taken = projection.shape[1]
    if may_be_less and taken <= value_dim:
        value_dim = taken
    shape = (heads, value_dim, projection.shape[2])
    _expect("value_projection", projection, shape, like, "[H, R, Dv], R at most a value's size")


def _check_parts(m: UnifiedMetadata) -> None:
    parts: dict[str, list[Tensor | int | None]] = {
        "causal": [m.causal_bias],
        "shared": [m.shared_blocks, m.shared_bias],
        "unique": [m.unique_blocks, m.unique_block_mapping, m.unique_bias],
    }
    for name, fields in parts.items():
        given = sum(field is not None for field in fields)
        if 0 < given < len(fields):
            raise ValueError(
                f"expected all fields of the {name} part or none of them, got {given} of "
                f"{len(fields)}: blocks without a bias would be left out in silence"
            )
    if not m.has_parts and m.by_request is None:
        raise ValueError(
            "expected at least one part of the attention, got none: "
            "give the step a causal bias, shared blocks or unique blocks"
        )
    for name, size in (("causal_width", m.causal_width), ("shared_chunk", m.shared_chunk)):
        if size is not None and size < 1:
            raise ValueError(f"{name}: expected at least 1 or None, got {size}: None is one piece")


def _check_shapes(m: UnifiedMetadata, tokens: int, heads: int, like: Tensor) -> None:
    _expect_ints("slot_mapping", m.slot_mapping, (tokens,), like)
    if m.causal_bias is not None:
        _expect_bias("causal_bias", m.causal_bias, (tokens, tokens), heads, like)
    if m.shared_blocks is not None and m.shared_bias is not None:
        blocks = m.shared_blocks.numel()
        _expect_ints("shared_blocks", m.shared_blocks, (blocks,), like)
        if m.shared_bias.is_floating_point():
            shape = (tokens, blocks, m.block_size)
            _expect_bias("shared_bias", m.shared_bias, shape, heads, like)
        else:
            _expect_ints("shared_bias (usages)", m.shared_bias, (tokens, blocks), like)
        if m.shared_lengths is not None:
            _expect_ints("shared_lengths", m.shared_lengths, (blocks,), like)
    if (
        m.unique_blocks is not None
        and m.unique_bias is not None
        and m.unique_block_mapping is not None
    ):
        listed = m.unique_blocks
        unique = listed if isinstance(listed, int) else listed.numel()
        if isinstance(listed, Tensor):
            _expect_ints("unique_blocks", listed, (unique,), like)
        _expect_ints("unique_block_mapping", m.unique_block_mapping, (unique,), like)
        between = (heads,) if m.unique_bias.dim() == 3 else ()
        _expect_floats("unique_bias", m.unique_bias, (unique, *between, m.block_size), like)
        if m.unique_queries is not None:
            _expect_ints("unique_queries", m.unique_queries, (m.unique_queries.numel(),), like)


def _check_requests(m: UnifiedMetadata, like: Tensor) -> None:
    given = (m.block_tables, m.seq_lens, m.query_start_loc)
    count = sum(field is not None for field in given)
    if 0 < count < len(given):
        raise ValueError(
            f"expected block_tables, seq_lens and query_start_loc together or none of them, got "
            f"{count} of them: fill all three, or none"
        )
    if m.block_tables is None or m.seq_lens is None or m.query_start_loc is None:
        return
    requests, width = m.block_tables.shape[0], m.block_tables.shape[-1]
    _expect_ints("block_tables", m.block_tables, (requests, width), like)
    _expect_ints("seq_lens", m.seq_lens, (requests,), like)
    _expect_ints("query_start_loc", m.query_start_loc, (requests + 1,), like)


def _check_positions(
    m: UnifiedMetadata, tokens: int, window: int | None, alibi_slopes: Tensor | None
) -> None:
    check_window(window)
    if (window is None and alibi_slopes is None) or not m.has_parts:
        return
    blocks = 0 if m.shared_blocks is None else m.shared_blocks.shape[0]
    unique = 0 if m.unique_block_mapping is None else m.unique_block_mapping.shape[0]
    needed = [("positions", m.positions, tokens)]
    if blocks:
        needed.append(("shared_starts", m.shared_starts, blocks))
    if unique:
        needed.append(("unique_starts", m.unique_starts, unique))
    for name, tensor, size in needed:
        if tensor is None:
            raise ValueError(
                f"metadata.{name}: expected it for a sliding window or ALiBi, got None: "
                "fill it, or use BatchBuilder"
            )
        _expect_ints(name, tensor, (size,), m.slot_mapping)


def _shape(tensor: Tensor, name: str, legend: str) -> tuple[int, int, int]:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name}: expected a tensor {legend}, got {type(tensor).__name__}: "
            "None is possible for value with value_cache only"
        )
    if tensor.dim() != 3:
        raise ValueError(
            f"{name}: expected {legend}, got shape {list(tensor.shape)}: "
            "flatten the batch to rows of tokens"
        )
    return tensor.shape[0], tensor.shape[1], tensor.shape[2]


def _expect(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    like: Tensor,
    remedy: str = _ANOTHER_BUCKET,
) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}: {remedy}")
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}: {remedy}"
        )
    if tensor.device != like.device:
        raise ValueError(
            f"{name}: expected it on {like.device}, got {tensor.device}: move it with .to()"
        )


def _expect_ints(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    _expect(name, tensor, shape, like)
    if tensor.dtype not in _INTS:
        raise TypeError(
            f"{name}: expected int32 or int64, got {tensor.dtype}: convert it with .to()"
        )


def _expect_bias(name: str, bias: Tensor, shape: tuple[int, ...], heads: int, like: Tensor) -> None:
    between = (heads,) if bias.dim() == len(shape) + 1 else ()
    _expect_floats(name, bias, (*between, *shape), like)


def _expect_floats(name: str, bias: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    _expect(name, bias, shape, like)
    if not bias.is_floating_point():
        raise TypeError(
            f"{name}: expected a float dtype, got {bias.dtype}: 0 shows a key and -inf hides it"
        )


def _given(tensor: Tensor | None) -> str:
    return "not given" if tensor is None else "given"
