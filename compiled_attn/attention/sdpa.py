"""Torch's fused CPU flash attention as `attend`, without a score matrix in memory.

About twice as fast as the reference under inductor at 4k keys, equal at 1k
(`benchmarks/attend.py`). The op `aten::_scaled_dot_product_flash_attention_for_cpu` also returns
the log-sum-exp.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_attn.arguments import FLOATS
from compiled_attn.attention.nonfinite import for_added_mask
from compiled_attn.attention.state import FMIN, PartialAttention, has_no_queries, of_no_queries
from compiled_attn.ops.traits import AttentionTraits, Implementation

__all__ = ["SdpaKernel"]


class SdpaKernel(Implementation):
    """Torch's flash attention on the CPU, without gradients."""

    name = "sdpa"

    def supports(self, traits: AttentionTraits) -> str | None:
        """See `compiled_attn.ops.Implementation`."""
        if traits.device != "cpu":
            return f"runs on cpu, not on {traits.device}"
        if traits.dtype not in FLOATS:
            return f"dtype {traits.dtype} is not one of {FLOATS}"
        if traits.gradients:  # the op has none for the log-sum-exp
            return "has no gradients"
        return "has no logit softcap" if traits.softcap else None

    def unavailable(self, traits: AttentionTraits) -> str | None:
        """See `compiled_attn.ops.Implementation`."""
        has_op = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
        return None if has_op else "this torch has no CPU flash attention"

    @staticmethod
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        fmin: float = FMIN,
    ) -> PartialAttention:
        """See `compiled_attn.attention.dense.attend`; ``softcap`` must be None.

        A query that sees a key of 2**64 or more becomes NaN, like one that sees an infinite key.
        """
        if softcap is not None:
            raise ValueError("the sdpa kernel has no softcap: choose the kernel with supports()")
        if has_no_queries(query):  # the op divides by zero, which kills the process
            return of_no_queries(query, value)
        group = query.shape[1] // key.shape[1]
        # A float32 mask represents finite biases exactly for a half precision query.
        mask = bias.to(torch.promote_types(query.dtype, torch.float32))
        key, value = key.to(query.dtype), value.to(query.dtype)
        seen = bias > -math.inf
        key, value, nan = for_added_mask(key, value, seen)
        dim, value_dim = query.shape[-1], value.shape[-1]
        query, key, value = (_widened(x, max(dim, value_dim)) for x in (query, key, value))
        sees = seen.any(-1).unsqueeze(-1)  # [T, 1] or [H, T, 1]
        sees = sees if bias.dim() == 2 else sees.squeeze(-1).T
        # A padded row of NaN gives NaN despite the mask, and the op ignores a query's last stride.
        query = torch.where(sees.unsqueeze(-1), query, 0).contiguous()
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.transpose(0, 1).unsqueeze(0),
            key.repeat_interleave(group, 1).transpose(0, 1).unsqueeze(0),
            value.repeat_interleave(group, 1).transpose(0, 1).unsqueeze(0),
            attn_mask=mask.expand(1, *((1,) if bias.dim() == 2 else ()), *bias.shape),
            scale=scale,
        )
        # For a row without visible keys the op returns zeros, but log-sum-exp 0 instead of -inf.
        row_max = torch.where(sees, (lse[0].clamp_min(fmin) + nan).T, fmin)
        total = sees.to(row_max.dtype).expand_as(row_max)
        out = out[0].transpose(0, 1)[..., :value_dim]
        return PartialAttention(out.to(row_max.dtype), row_max, total)


def _widened(rows: Tensor, dim: int) -> Tensor:
    # The op has one head size. Zeros change no score, and their outputs are dropped.
    return rows if rows.shape[-1] == dim else F.pad(rows, (0, dim - rows.shape[-1]))
