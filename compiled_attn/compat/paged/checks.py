"""What is wrong with a call: shapes, dtypes, devices, plain numbers, then numbers in tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_attn.compat.paged.call import PagedCall
from compiled_attn.compat.paged.errors import PagedArgumentError, expect
from compiled_attn.compat.paged.layouts import Layout, axes, key_shape, value_shape
from compiled_attn.compat.paged.pages import lost_rows, unknown_blocks
from compiled_attn.compat.paged.quant import Scale, check_scale, element_type
from compiled_attn.ops.overlap import expect_apart
from compiled_attn.ops.tracing import can_read

__all__ = [
    "FLOATS",
    "INTS",
    "check_apart",
    "check_caches",
    "check_call",
    "expect_tensor",
    "refuse_blocksparse",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)


def check_call(call: PagedCall) -> list[int] | None:
    """Raises unless everything fits together.

    Returns:
        The numbers in ``seq_lens``, or None where none can be read, and so none were checked.

    Raises:
        PagedArgumentError: shapes, dtypes, devices or numbers do not fit.
        TypeError: a tensor or an int is none.
    """
    query = call.query
    expect_tensor("query", query, "(num_seqs, H, D)", (None, None, None), FLOATS)
    for name in ("num_kv_heads", "block_size", "max_seq_len"):
        _expect_int(name, getattr(call, name), 0 if name == "max_seq_len" else 1)
    scale: object = call.scale
    if not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"scale: expected a number, got {type(scale).__name__}: pass a float")
    seqs, heads, dim = query.shape
    kv_heads, device = call.num_kv_heads, query.device
    expect(dim > 0, "a head dim of at least 1", dim, "check the shape of query")
    divides = heads > 0 and heads % kv_heads == 0
    expect(divides, "H divisible by num_kv_heads", (heads, kv_heads), "check num_kv_heads")
    rank = axes(call.layout, is_key=True)
    expect_tensor("key_cache", call.key_cache, f"in layout {call.layout}", (None,) * rank, None)
    sizes = (call.num_blocks, call.block_size, kv_heads, dim)
    check_caches(
        call.key_cache,
        call.value_cache,
        sizes,
        call.layout,
        call.kv_cache_dtype,
        call.k_scale,
        call.v_scale,
        query,
    )
    expect_tensor(
        "block_tables", call.block_tables, "(num_seqs, W)", (seqs, None), INTS, device=device
    )
    expect_tensor("seq_lens", call.seq_lens, "(num_seqs,)", (seqs,), INTS, device=device)
    if call.alibi_slopes is not None:
        expect_tensor("alibi_slopes", call.alibi_slopes, "(H,)", (heads,), FLOATS, device=device)
    return _check_numbers(call) if can_read(query) else None


def check_apart(call: PagedCall, **written: Tensor) -> None:
    """Raises unless what is written is memory of its own, apart from the indices of the call."""
    indices = {"block_tables": call.block_tables, "seq_lens": call.seq_lens}
    expect_apart(written, indices, PagedArgumentError)


def check_caches(
    key_cache: Tensor,
    value_cache: Tensor,
    sizes: tuple[int, int, int, int],
    layout: Layout,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    like: Tensor,
) -> None:
    """Raises unless both caches have this layout, sizes (NB, BS, Hk, D), dtype and scales."""
    dtype = element_type(kv_cache_dtype, like.dtype)
    dtypes = (dtype, torch.uint8) if kv_cache_dtype.startswith("fp8") else (dtype,)
    legend = f"in layout {layout}"
    key, value = key_shape(layout, *sizes, dtype), value_shape(layout, *sizes)
    expect_tensor("key_cache", key_cache, legend, key, dtypes, device=like.device)
    expect_tensor("value_cache", value_cache, legend, value, dtypes, device=like.device)
    if kv_cache_dtype != "auto":
        check_scale("k_scale", k_scale, sizes[2], like.device)
        check_scale("v_scale", v_scale, sizes[2], like.device)


def refuse_blocksparse(local_blocks: int, vert_stride: int, sliding_step: int) -> None:
    """Raises unless block-sparse attention is off: dense attention is not what was asked for."""
    given = {
        "blocksparse_local_blocks": local_blocks,
        "blocksparse_vert_stride": vert_stride,
        "blocksparse_head_sliding_step": sliding_step,
    }
    off = local_blocks == 0 and vert_stride in (0, 1) and sliding_step == 0
    expect(
        off,
        "block-sparse attention to be off (0)",
        given,
        "it is not supported: leave these arguments out",
    )


def expect_tensor(
    name: str,
    tensor: object,
    legend: str,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] | None,
    *,
    device: torch.device | None = None,
) -> None:
    """Raises unless it is a tensor of this shape, one of these dtypes, this device (None: any)."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name}: expected a tensor {legend}, got {type(tensor).__name__}: pass a tensor"
        )
    fits = tensor.dim() == len(shape) and all(
        size is None or size == given for size, given in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        expect(
            False, f"{name} {legend} of shape [{sizes}]", tensor.shape, "match the other arguments"
        )
    if dtypes is not None and tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        expect(
            False,
            f"{name} of dtype {wanted}",
            got,
            "convert it with .to(), or name its kv_cache_dtype",
        )
    if device is not None and tensor.device != device:
        expect(False, f"{name} on {device}", tensor.device, "move it with .to()")


def _expect_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}: pass a plain number")
    expect(value >= least, f"{name} of at least {least}", value, "check the sizes of the cache")


def _check_numbers(call: PagedCall) -> list[int]:
    """Raises unless lengths and used entries of the tables are in range; returns the lengths."""
    flags: list[int] = torch.cat([call.seq_lens, lost_rows(call).to(call.seq_lens.dtype)]).tolist()
    lengths, lost = flags[: len(flags) // 2], flags[len(flags) // 2 :]
    if any(lost):
        _explain_lost(call, lost.index(1))
    return lengths


def _explain_lost(call: PagedCall, row: int) -> None:
    length, fits = int(call.seq_lens[row]), call.capacity
    expect(
        0 <= length <= fits,
        f"seq_lens[{row}] in 0 .. {fits} (block_tables has {call.block_tables.shape[1]} columns "
        f"of {call.block_size}, "
        f"max_seq_len is {call.max_seq_len})",
        length,
        "widen the table or raise max_seq_len",
    )
    column = int(unknown_blocks(call)[row].nonzero()[0])
    raise PagedArgumentError(
        f"expected block_tables[{row}, {column}] in 0 .. {call.num_blocks - 1}, "
        f"got {int(call.block_tables[row, column])}: "
        f"the row's {length} tokens need it, so give it a block of the cache"
    )
