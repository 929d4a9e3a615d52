"""Merges attention over a step's new tokens with attention over their context."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_attn.ops.triton.arguments import Launch

_ROWS = 16  # of a token and head


@triton.jit(do_not_specialize=["tokens", "requests"])
def combine_kernel(
    new, context,  # [T, HEADS, DIM], normalised
    new_lse,  # [HEADS, T] float32
    context_lse,  # [T, HEADS] float32
    starts,  # [R + 1]
    out, lse,  # [T, HEADS, DIM], [T, HEADS] float32
    tokens, requests, lse_head, lse_token,  # strides of new_lse
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merges ``ROWS`` rows of a token and head. Grid: ``(cdiv(T * HEADS, ROWS),)``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    is_row = token < tokens
    is_own = is_row & (token >= tl.load(starts)) & (token < tl.load(starts + requests))
    at = token * lse_token + head * lse_head
    first = tl.load(new_lse + at, mask=is_own, other=0.0)
    # Each row sees its own token: flash attention has an infinite lse for NaN.
    first = tl.where(tl.abs(first) < float("inf"), first, float("nan"))
    second = tl.load(context_lse + row, mask=is_own, other=0.0)
    top = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    first, second = tl.exp(first - top), tl.exp(second - top)
    total = first + second
    dims = tl.arange(0, BLOCK)[None, :]
    at, is_read = row[:, None] * DIM + dims, is_own[:, None] & (dims < DIM)
    result = first[:, None] * tl.load(new + at, mask=is_read, other=0.0).to(tl.float32)
    result += second[:, None] * tl.load(context + at, mask=is_read, other=0.0).to(tl.float32)
    result = tl.where(is_own[:, None], result / total[:, None], 0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dims < DIM))
    tl.store(lse + row, tl.where(is_own, top + tl.log(total), float("-inf")), mask=is_row)


def combine_launch(
    new: tuple[Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    starts: Tensor,
    results: tuple[Tensor, Tensor],
) -> Launch:
    """Returns the launch for the arguments of `combine` and its results."""
    tokens, heads, dim = context[0].shape
    lse_head, lse_token = new[1].stride()
    arguments = {
        "new": new[0].contiguous(), "context": context[0], "new_lse": new[1],
        "context_lse": context[1], "starts": starts, "out": results[0], "lse": results[1],
        "tokens": tokens, "requests": len(starts) - 1, "lse_head": lse_head,
        "lse_token": lse_token, "HEADS": heads, "DIM": dim,
        "BLOCK": max(16, triton.next_power_of_2(dim)), "ROWS": _ROWS,
    }  # fmt: skip
    return Launch((triton.cdiv(tokens * heads, _ROWS),), arguments, {"num_warps": 4})


def combine(
    new: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Merges two normalised attentions by their log-sum-exps.

    new: out ``[T, H, D]`` and lse ``[H, T]`` of flash attention, undefined in rows of no request.
    context: out ``[T, H, D]`` and lse ``[T, H]``, -inf where a row sees nothing. starts:
    ``[R + 1]``, first row of each request. Returns results as the op has them.
    """
    results = torch.empty_like(context[0]), torch.empty_like(context[1])
    launch = combine_launch(new, context, starts, results)
    if all(launch.grid):
        combine_kernel[launch.grid](**launch.arguments, **launch.options)
    return results
