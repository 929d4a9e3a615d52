"""What kernels of the FlashAttention family have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.ops.call import PagedCall

__all__ = ["capability", "lacks", "lacks_device", "own_rows", "window_of"]

_MAX_HEAD_DIM = 256


def lacks(call: PagedCall, *, softcap: bool = False) -> str | None:
    """Returns what such a kernel does not support of a call, or None; softcap: it has that."""
    return _lacks_scores(call, softcap) or _lacks_sizes(call) or lacks_device(call.query.device)


def lacks_device(device: torch.device) -> str | None:
    """Returns that a device is not one of NVIDIA's, or None."""
    if device.type != "cuda" or torch.version.hip:
        return f"runs on NVIDIA's devices, not on {'AMD' if torch.version.hip else device.type}"
    return None


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def window_of(call: PagedCall) -> tuple[int, int]:
    """Returns how many keys to the left and right of its own a row sees; -1: all."""
    window = call.scoring.window
    return (-1 if window is None else window - 1, 0) if call.causal else (-1, -1)


def own_rows(call: PagedCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns results as the op has them: rows of no request are zero, without keys lse is -inf.

    FlashAttention does not write rows of no request, and rows without keys have an lse of either
    infinity. lse: ``[H, T]``.
    """
    starts = call.query_start_loc
    row = torch.arange(call.query.shape[0], device=call.query.device)
    is_own = ((row >= starts[0]) & (row < starts[-1]))[:, None]
    lse = torch.where(is_own & ~lse.t().isinf(), lse.t(), float("-inf"))
    return torch.where(is_own[:, None], out, 0.0), lse.contiguous()


def _lacks_scores(call: PagedCall, softcap: bool) -> str | None:
    scoring = call.scoring
    has = {
        "softcap": scoring.softcap is not None and not softcap,
        "ALiBi": scoring.alibi_slopes is not None,
        "sinks": scoring.sinks is not None,
    }
    lacks = [name for name, is_wanted in has.items() if is_wanted]
    return f"has no {' and no '.join(lacks)}" if lacks else None


def _lacks_sizes(call: PagedCall) -> str | None:
    dtype, dim, value_dim = call.query.dtype, call.query.shape[2], call.value_cache.shape[3]
    if dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {dtype}"
    if (cache := call.key_cache.dtype) != dtype:
        return f"has no cache of {cache} for queries of {dtype}"
    if dim > _MAX_HEAD_DIM or dim % 8:
        return f"has head sizes that 8 divides, up to {_MAX_HEAD_DIM}, not {dim}"
    if value_dim != dim:
        return f"has values of the head size of keys, {dim}, not {value_dim}"
    return None
