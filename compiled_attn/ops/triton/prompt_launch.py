"""Launches `prompt.prompt_kernel`, which reads tiles of keys by tensor descriptors."""

from __future__ import annotations

import contextvars
import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.providers.base import Paged
from compiled_attn.ops.triton.arguments import Launch
from compiled_attn.ops.triton.combine import combine
from compiled_attn.ops.triton.prompt import prompt_kernel
from compiled_attn.ops.triton.tiles import Tile

__all__ = ["attend", "launches", "page_keys", "tile_of", "why_not"]

_DTYPES = (torch.float16, torch.bfloat16)
_ALIGNED = 16  # bytes
_MAX_DIM = 256
_MAX_REQUESTS = 1 << 16
_MIN_SCALE = 2.0**-100  # not flushed to 0 on any device


def why_not(call: PagedCall) -> str | None:
    """Returns why the kernel cannot compute a call on any device, or None."""
    scoring, dtype, dim = call.scoring, call.query.dtype, call.query.shape[2]
    if dtype not in _DTYPES:
        return f"computes in float16 and bfloat16, not in {dtype}"
    if call.key_cache.dtype != dtype:
        return f"has no cache of {call.key_cache.dtype} for queries of {dtype}"
    has = {
        "window": scoring.window, "softcap": scoring.softcap, "ALiBi": scoring.alibi_slopes,
    }  # fmt: skip
    if lacks := [name for name, wanted in has.items() if wanted is not None]:
        return f"has no {' and no '.join(lacks)}"
    if scoring.scale < _MIN_SCALE:
        return f"has positive scales, not {scoring.scale}"
    if dim > _MAX_DIM or dim % 8:
        return f"has head sizes that 8 divides, up to {_MAX_DIM}, not {dim}"
    if call.value_cache.shape[3] != dim:
        return f"has values of the head size of keys, {dim}, not {call.value_cache.shape[3]}"
    if len(call.seq_lens) >= _MAX_REQUESTS:
        return f"has fewer than {_MAX_REQUESTS} requests, not {len(call.seq_lens)}"
    return _lacks_keys(call)


def attend(
    call: PagedCall, paged: Paged, tile: Tile | None = None, *, specialized: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes out ``[T, H, D]`` and lse ``[T, H]`` of a call that it can, see `why_not`.

    Keys of pages that are whole tiles are read from the caches, which hold the new tokens. With
    smaller pages, new tokens are read where they were computed, and ``paged`` computes their
    context. specialized: see `prompt.prompt_kernel`.
    """
    tile = tile or tile_of(call)
    if not call.query.shape[0]:
        return paged(call)
    if page_keys(call, tile):
        return _run(call, tile, specialized)
    out, lse = _run(call, tile, specialized)
    lengths = call.seq_lens - torch.diff(call.query_start_loc)
    context = paged(call._replace(seq_lens=lengths, causal=False, new=None))
    return combine((out, lse.t()), context, call.query_start_loc)


def tile_of(call: PagedCall) -> Tile:
    """Returns the tile for the head size and device of a call."""
    dim, device = call.query.shape[2], call.query.device
    is_small = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 12
    if is_small or dim > 128:  # sm_120 has 99 KB of shared memory
        return Tile(128, 64, 8, 2)
    return Tile(128, 128, 8, 2)


def page_keys(call: PagedCall, tile: Tile) -> int:
    """Returns the keys of a tile that lies in one page; 0: pages are no whole tiles."""
    sizes = (tile.keys, tile.keys // 2)
    return next((keys for keys in sizes if call.key_cache.shape[1] % keys == 0), 0)


def launches(
    call: PagedCall, tile: Tile, results: tuple[Tensor, Tensor], *, specialized: bool, widen: bool
) -> list[Launch]:
    """Returns the launches that compute results, in order; widen: as of `attend_launch`."""
    if not specialized:
        return [_launch(call, tile, results, widen)]
    return [
        _launch(call, tile, results, widen, SPECIALIZED=True),
        _launch(call, tile, results, widen, REPAIRS=True),
    ]


def _launch(
    call: PagedCall, tile: Tile, results: tuple[Tensor, Tensor], widen: bool, **kind: bool
) -> Launch:
    query, in_pages = call.query, page_keys(call, tile)
    tokens, heads, dim = query.shape
    requests, width = call.block_table.shape
    kv_heads, block = call.key_cache.shape[2], max(16, triton.next_power_of_2(dim))
    group = heads // kv_heads
    tile_heads = min(group & -group, tile.rows)  # a power of two that divides the group
    keys, values = call.key_cache, call.value_cache
    if not in_pages:
        assert call.new is not None
        keys, values = call.new.key[None], call.new.value[None]
    shape = [1, in_pages or tile.keys, 1, block]
    arguments = {
        "query": query, "key": TensorDescriptor.from_tensor(keys, shape),
        "value": TensorDescriptor.from_tensor(values, shape), "block_table": call.block_table,
        "seq_lens": call.seq_lens, "starts": call.query_start_loc, "sinks": call.scoring.sinks,
        "out": results[0], "lse": results[1], "factor": call.scoring.scale * math.log2(math.e),
        "tokens": tokens, "requests": requests, "width": width, "blocks": keys.shape[0],
        "q_token": query.stride(0), "q_head": query.stride(1),
        "table_row": call.block_table.stride(0), "HEADS": heads, "GROUP": group,
        "TILE_HEADS": tile_heads, "DIM": dim, "BLOCK": block,
        "PAGE": keys.shape[1] if in_pages else 0, "CAUSAL": call.causal,
        "SINKS": call.scoring.sinks is not None, "ROWS": tile.rows, "KEYS": shape[1],
        "SPECIALIZED": False, "REPAIRS": False, "WIDEN": widen, **kind,
    }  # fmt: skip
    grid = tokens // (tile.rows // tile_heads) + max(requests, 1), heads // tile_heads
    # Two groups of four warps multiply and four warps load: the compiler is told of four.
    warps = 4 if kind.get("SPECIALIZED") else tile.warps
    return Launch(grid, arguments, {"num_warps": warps, "num_stages": tile.stages})


def _run(call: PagedCall, tile: Tile, specialized: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(call.query, memory_format=torch.contiguous_format)
    lse = out.new_empty(out.shape[:2], dtype=torch.float32)
    is_interpreted = not isinstance(prompt_kernel, triton.JITFunction)
    widen = is_interpreted and out.dtype == torch.bfloat16  # triton issue 11584

    def memory(size: int, *_: Any) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=out.device)

    def run() -> None:
        triton.set_allocator(memory)
        for each in launches(call, tile, (out, lse), specialized=specialized, widen=widen):
            prompt_kernel[each.grid](**each.arguments, **each.options)

    contextvars.copy_context().run(run)  # leaves the caller's allocator as it is
    return out, lse


def _lacks_keys(call: PagedCall) -> str | None:
    read = {"query": call.query, "key_cache": call.key_cache, "value_cache": call.value_cache}
    if not page_keys(call, tile_of(call)):
        if call.new is None:
            return f"needs the new keys and values next to pages of {call.key_cache.shape[1]}"
        if call.scoring.sinks is not None:
            return f"has no sinks with pages of {call.key_cache.shape[1]}"
        read = {"query": call.query, "key": call.new.key, "value": call.new.value}
    for name, tensor in read.items():
        steps = [step * tensor.itemsize for step in tensor.stride()[:-1]]
        if tensor.stride(-1) != 1 or any(each % _ALIGNED for each in (*steps, tensor.data_ptr())):
            return f"needs rows of {name} at multiples of {_ALIGNED} bytes"
    return None
