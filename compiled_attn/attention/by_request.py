"""Unified attention request by request: one op that writes and attends, whatever the step is."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.attention.call import UnifiedCall
from compiled_attn.cache.writes import write_step
from compiled_attn.ops import as_int32

__all__ = ["attend_requests"]


def attend_requests(call: UnifiedCall, fused_write: bool) -> tuple[Tensor, Tensor]:
    """Out ``[T, H, Dv]`` in the query's dtype and lse ``[T, H]`` of a call.

    ``fused_write`` False: torch writes the cache, which a nested compile region can do, and the op
    reads it.
    """
    metadata = call.metadata
    assert metadata.by_request is not None
    size = metadata.block_size
    step = [_rows(as_int32(ints)) for ints in metadata.by_request]
    options = {
        "window": call.sliding_window,
        "softcap": call.softcap,
        "alibi_slopes": _floats(call.alibi_slopes),
        "sinks": _floats(call.sinks),
        "key_scale": _by_block(call.key_scale, size),
    }
    query, keys = _rows(call.query), _by_block(call.key_cache, size)
    if call.value is not None and call.value_cache is not None and fused_write:
        out, lse = torch.ops.compiled_attn.paged_attention_(
            query, _rows(call.key), _rows(call.value), keys, _by_block(call.value_cache, size),
            metadata.slot_mapping.long().contiguous(), *step, call.scale,
            value_scale=_by_block(call.value_scale, size), **options,
        )  # fmt: skip
        return out, lse
    write_step(call)
    values, value_scale = call.values
    out, lse = torch.ops.compiled_attn.paged_attention(
        query, keys, _by_block(values, size), *step, call.scale,
        value_scale=_by_block(value_scale, size), **options,
    )  # fmt: skip
    return out, lse


def _by_block(slots: Tensor | None, block_size: int) -> Tensor | None:
    return None if slots is None else slots.unflatten(0, (-1, block_size))


def _rows(tensor: Tensor) -> Tensor:
    """The op walks along the last axis, and takes any other strides; vectors are dense."""
    return tensor if tensor.dim() > 1 and tensor.stride(-1) == 1 else tensor.contiguous()


def _floats(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.float().contiguous()
