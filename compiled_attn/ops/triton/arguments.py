"""Builds the arguments of the kernels from a call and its plan, without reading the device."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_attn.cache.quantisation import largest
from compiled_attn.ops.call import NewTokens, PagedCall
from compiled_attn.ops.triton.tiles import Plan, Problem, Tile, key_blocks

__all__ = [
    "CODES", "MAX_AMD_WARPS", "Launch", "Results", "arrivals_of", "attend_launch", "problem_of",
    "results_of", "write_launch",
]  # fmt: skip

CODES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Names of the dtypes of quantised caches in kernels."""

_MIN_SCALE = 2.0**-100  # not flushed to 0 on any device
_MAX_WINDOW = 1 << 30  # adding a position does not overflow
_WRITE_TILE = 2048
_MERGED_AT_ONCE = 2048  # elements of a part
MAX_AMD_WARPS = 8
"""AMD warps have 64 threads, twice as many: more of them would run out of registers."""


class Launch(NamedTuple):
    """A grid, arguments by name, and compiler options."""

    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


class Results(NamedTuple):
    """What `attend.attend_kernel` writes; without splits, no parts and no counters."""

    out: Tensor
    lse: Tensor
    part_sums: Tensor | None = None
    part_tops: Tensor | None = None
    part_totals: Tensor | None = None
    arrivals: Tensor | None = None


def problem_of(call: PagedCall) -> Problem:
    """Returns the sizes of a call."""
    tokens, heads, key_dim = call.query.shape
    _, page, kv_heads, value_dim = call.value_cache.shape
    requests, width = call.block_table.shape
    return Problem(
        tokens, requests, kv_heads, heads // kv_heads, key_dim, value_dim, width * page, page,
        _name(call.query.dtype), CODES.get(call.key_cache.dtype, "none"),
    )  # fmt: skip


def arrivals_of(call: PagedCall, plan: Plan) -> Tensor | None:
    """Allocates the counters of stored splits, which must be zeroed; None: there are no splits."""
    if plan.splits == 1:
        return None
    return call.query.new_empty(_grid(problem_of(call), plan.tile), dtype=torch.int32)


def results_of(call: PagedCall, plan: Plan, arrivals: Tensor | None) -> Results:
    """Allocates what `attend.attend_kernel` writes next to the counters of `arrivals_of`."""
    query, shape = call.query, (*call.query.shape[:2], call.value_cache.shape[3])
    out, lse = query.new_empty(shape), query.new_empty(shape[:2], dtype=torch.float32)
    if arrivals is None:
        return Results(out, lse)
    sums = query.new_empty(plan.splits, *shape, dtype=torch.float32)
    tops, totals = query.new_empty(2, plan.splits, *shape[:2], dtype=torch.float32)
    return Results(out, lse, sums, tops, totals, arrivals)


def attend_launch(
    call: PagedCall, plan: Plan, results: Results, *, widen: bool, has_fp8: bool
) -> Launch:
    """Returns the launch of `attend.attend_kernel`; results: those of `results_of`.

    ``widen``: multiply bfloat16 in float32 (interpreter); ``has_fp8``: the device converts e4m3.
    """
    problem, tile, splits = problem_of(call), plan.tile, plan.splits
    scoring = call.scoring
    window, softcap, slopes = scoring.window, scoring.softcap, scoring.alibi_slopes
    tile_heads = min(problem.group, tile.rows)
    key_block, rest_block = key_blocks(problem.key_dim)
    is_raised = softcap is not None or slopes is not None
    arguments = {
        "query": call.query, **_caches(call), "block_table": call.block_table,
        "seq_lens": call.seq_lens, "starts": call.query_start_loc,
        "slopes": slopes, "sinks": scoring.sinks, **results._asdict(),
        "factor": float(scoring.scale) * (1.0 if is_raised else math.log2(math.e)),
        "cap": float(softcap or 0.0), "lowest": -math.inf, "window": min(window or 0, _MAX_WINDOW),
        "tokens": problem.tokens, "requests": problem.requests, "width": call.block_table.shape[1],
        **_strides("q", call.query, ("token", "head")), "table_row": call.block_table.stride(0),
        "HEADS": call.query.shape[1], "GROUP": problem.group, "TILE_HEADS": tile_heads,
        "KEY_DIM": problem.key_dim, "KEY_BLOCK": key_block, "REST_BLOCK": rest_block,
        "VALUE_DIM": problem.value_dim, "VALUE_BLOCK": _block(problem.value_dim),
        "CAUSAL": call.causal, "WINDOWED": window is not None, "CAPPED": softcap is not None,
        "ALIBI": slopes is not None, "SINKS": scoring.sinks is not None,
        "FACTOR_LAST": scoring.scale > _MIN_SCALE and not is_raised and call.key_scale is None,
        "IS_SPLIT": splits > 1, "ROWS": tile.rows, "KEYS": tile.keys,
        "MERGE_ROWS": _merge_rows(tile.rows, tile_heads, _block(problem.value_dim)),
        "WIDEN": widen, "HAS_FP8": has_fp8,
    }  # fmt: skip
    grid = *_grid(problem, tile), splits
    warps = min(tile.warps, MAX_AMD_WARPS) if torch.version.hip else tile.warps
    return Launch(grid, arguments, {"num_warps": warps, "num_stages": tile.stages})


def write_launch(call: PagedCall, new: NewTokens, arrivals: Tensor | None) -> Launch:
    """Returns the launch of `write.write_kernel`, which zeroes ``arrivals``."""
    problem = problem_of(call)
    blocks = {"KEY": _block(problem.key_dim), "VALUE": _block(problem.value_dim)}
    tile_heads = max(1, min(_block(problem.kv_heads, 1), _WRITE_TILE // max(blocks.values())))
    arguments = {
        "key": new.key, "value": new.value, **_caches(call), "slots": new.slot_mapping,
        "arrivals": arrivals, "counters": 0 if arrivals is None else arrivals.numel(),
        **_strides("key", new.key, ("token", "head")),
        **_strides("value", new.value, ("token", "head")),
        "KV_HEADS": problem.kv_heads, "TILE_HEADS": tile_heads,
        "KEY_DIM": problem.key_dim, "KEY_BLOCK": blocks["KEY"],
        "VALUE_DIM": problem.value_dim, "VALUE_BLOCK": blocks["VALUE"],
        "LARGEST": 1.0 if call.key_scale is None else largest(call.key_cache.dtype),
    }  # fmt: skip
    grid = problem.tokens, -(-problem.kv_heads // tile_heads)
    return Launch(grid, arguments, {"num_warps": 4})


def _grid(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Tiles of rows and of heads."""
    heads = min(problem.group, tile.rows)
    tiles = problem.tokens // (tile.rows // heads) + max(problem.requests, 1)
    return tiles, problem.kv_heads * -(-problem.group // heads)


def _merge_rows(rows: int, heads: int, value_block: int) -> int:
    """Rows merged at once: those of a token of a decode, unless registers would run out."""
    return max(1, min(max(_block(heads, 1), rows // 8), _MERGED_AT_ONCE // value_block))


def _caches(call: PagedCall) -> dict[str, Any]:
    """Arguments that describe the caches; fp8 as bytes."""
    axes = "block", "slot", "head"
    return {
        "key_cache": _bytes(call.key_cache), "value_cache": _bytes(call.value_cache),
        "key_scale": call.key_scale, "value_scale": call.value_scale,
        "blocks": call.key_cache.shape[0], **_strides("k", call.key_cache, axes),
        **_strides("v", call.value_cache, axes), **_strides("ks", call.key_scale, axes),
        **_strides("vs", call.value_scale, axes), "PAGE": call.key_cache.shape[1],
        "CODES": CODES.get(call.key_cache.dtype, "none"),
    }  # fmt: skip


def _strides(prefix: str, tensor: Tensor | None, axes: tuple[str, ...]) -> dict[str, int]:
    steps = (0,) * len(axes) if tensor is None else tensor.stride()[: len(axes)]
    return {f"{prefix}_{axis}": step for axis, step in zip(axes, steps, strict=True)}


def _bytes(cache: Tensor) -> Tensor:
    is_float8 = cache.dtype in CODES and cache.dtype.is_floating_point
    return cache.view(torch.uint8) if is_float8 else cache


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _block(size: int, least: int = 16) -> int:
    return max(least, 1 << (size - 1).bit_length())
