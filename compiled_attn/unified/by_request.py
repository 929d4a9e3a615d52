"""Unified attention request by request: one op that writes and attends, whatever the step is."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.kernels.native import as_int32
from compiled_attn.unified.metadata import UnifiedMetadata
from compiled_attn.unified.write import write_cache

__all__ = ["attend_requests"]


def attend_requests(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    scale: float,
    metadata: UnifiedMetadata,
    sliding_window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    latent: int | None,
    fused_write: bool,
) -> tuple[Tensor, Tensor]:
    """Out ``[T, H, Dv]`` in the query's dtype and lse ``[T, H]`` of checked arguments.

    They are those of `unified_attention`; ``latent`` elements of a key are its value where there
    are no values, None: all. ``fused_write`` False: torch writes the cache, which a nested compile
    region can do, and the op reads it.
    """
    assert metadata.by_request is not None
    size = metadata.block_size
    step = [_rows(as_int32(ints)) for ints in metadata.by_request]
    options = {
        "window": sliding_window,
        "softcap": softcap,
        "alibi_slopes": _floats(alibi_slopes),
        "sinks": _floats(sinks),
        "key_scale": _by_block(key_scale, size),
    }
    keys = _by_block(key_cache, size)
    if value is not None and value_cache is not None and fused_write:
        out, lse = torch.ops.compiled_attn.paged_attention_(
            _rows(query), _rows(key), _rows(value), keys, _by_block(value_cache, size),
            metadata.slot_mapping.long().contiguous(), *step, scale,
            value_scale=_by_block(value_scale, size), **options,
        )  # fmt: skip
        return out, lse
    write_cache(key_cache, key, metadata.slot_mapping, key_scale)
    if value is not None and value_cache is not None:
        write_cache(value_cache, value, metadata.slot_mapping, value_scale)
    else:  # values that are a part of the keys are written with them, and read through a view
        value_cache, value_scale = key_cache[..., :latent], key_scale
    out, lse = torch.ops.compiled_attn.paged_attention(
        _rows(query), keys, _by_block(value_cache, size), *step, scale,
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
