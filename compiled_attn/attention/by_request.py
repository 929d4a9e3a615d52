"""Unified attention request by request: one op that writes and attends, whatever the step is."""

from __future__ import annotations

from torch import Tensor

from compiled_attn.attention.call import UnifiedCall
from compiled_attn.cache.writes import write_step
from compiled_attn.ops import NewTokens, PagedCall, attend_paged

__all__ = ["attend_requests"]


def attend_requests(call: UnifiedCall, fused_write: bool) -> tuple[Tensor, Tensor]:
    """Out ``[T, H, Dv]`` in the query's dtype and lse ``[T, H]`` of a call.

    ``fused_write`` False: torch writes the cache, which a nested compile region can do, and the op
    reads it.
    """
    m = call.metadata
    assert m.by_request is not None
    new = None
    if call.value is not None and call.value_cache is not None and fused_write:
        new = NewTokens(call.key, call.value, m.slot_mapping)
    else:
        write_step(call)
    caches = call.key_cache, *call.values, call.key_scale
    keys, values, value_scale, key_scale = (
        None if each is None else each.unflatten(0, (-1, m.block_size)) for each in caches
    )
    assert keys is not None and values is not None
    return attend_paged(
        PagedCall(
            call.query,
            keys,
            values,
            *m.by_request,
            call.scoring,
            key_scale=key_scale,
            value_scale=value_scale,
            new=new,
        )
    )
