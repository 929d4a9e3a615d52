"""The state ops in Python: one request after another, token by token.

Every implementation computes tokens in this order, so no bit depends on how a prompt is cut, on
other requests, or on threads. States decay and grow in their own dtype: float32, or float64 for
tests. Formulas are those of transformers; see `register` for shapes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu as silu_of

from compiled_attn.ops.states import arguments
from compiled_attn.ops.states.arguments import StateStep

__all__ = ["state_conv_", "state_delta_", "state_scan_", "state_ssd_"]


def state_conv_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    silu: bool,
) -> Tensor:
    """Causal depthwise convolution; the state holds the last K - 1 inputs, the oldest first."""
    step = StateStep(slots, seq_lens, query_start_loc)
    arguments.check_conv(x, weight, bias, state, step)
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(dtype)

    def token(past: Tensor, t: int) -> tuple[Tensor, Tensor]:
        window = torch.cat([past, x[t].unsqueeze(1)], 1)
        total = bias.to(dtype) if bias is not None else torch.zeros_like(taps[:, 0])
        for k in range(taps.shape[1]):
            total = total + window[:, k] * taps[:, k]
        # The sum is rounded before the activation, as layers of transformers do.
        rounded = total.to(x.dtype)
        return window[:, 1:], silu_of(rounded) if silu else rounded

    return _recur(token, x.new_empty(x.shape), state, step)


def state_delta_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    l2norm: bool,
    scale: float | None,
) -> Tensor:
    """Gated delta rule: decay, replace what is held for the key by ``beta`` of the value, read."""
    step = StateStep(slots, seq_lens, query_start_loc)
    arguments.check_delta(q, k, v, g, beta, state, step)
    repeats, dtype = v.shape[1] // q.shape[1], state.dtype
    query_scale = q.shape[2] ** -0.5 if scale is None else scale

    def token(past: Tensor, t: int) -> tuple[Tensor, Tensor]:
        query, key = (_normed(x[t].to(dtype), l2norm).repeat_interleave(repeats, 0) for x in (q, k))
        decay = g[t].to(dtype).exp().view(len(past), -1, 1)
        decayed = past * decay
        held = (decayed * key.unsqueeze(2)).sum(1)
        change = (v[t].to(dtype) - held) * beta[t].to(dtype).unsqueeze(1)
        new = decayed + key.unsqueeze(2) * change.unsqueeze(1)
        return new, (new * (query * query_scale).unsqueeze(2)).sum(1)

    return _recur(token, v.new_empty(v.shape), state, step)


def state_ssd_(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Mamba 2: ``S = exp(dt A) S + dt x B``, ``out = S C + D x``, with one ``A`` per head."""
    step = StateStep(slots, seq_lens, query_start_loc)
    arguments.check_ssd(x, dt, A, B, C, D, state, step)
    repeats, dtype = x.shape[1] // B.shape[1], state.dtype

    def token(past: Tensor, t: int) -> tuple[Tensor, Tensor]:
        b, c = (each[t].to(dtype).repeat_interleave(repeats, 0).unsqueeze(1) for each in (B, C))
        value, step_size = x[t].to(dtype), dt[t].to(dtype).unsqueeze(1)
        decay = (step_size * A.to(dtype).unsqueeze(1)).exp().unsqueeze(2)
        new = past * decay + (value * step_size).unsqueeze(2) * b
        out = (new * c).sum(2)
        return new, out if D is None else out + D.to(dtype).unsqueeze(1) * value

    return _recur(token, x.new_empty(x.shape, dtype=dtype), state, step)


def state_scan_(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Mamba 1: ``S = exp(dt A) S + dt x B``, ``out = S C + D x``, with an ``A`` per element."""
    step = StateStep(slots, seq_lens, query_start_loc)
    arguments.check_scan(x, dt, A, B, C, D, state, step)
    dtype = state.dtype

    def token(past: Tensor, t: int) -> tuple[Tensor, Tensor]:
        value, step_size = x[t].to(dtype), dt[t].to(dtype)
        decay = (step_size.unsqueeze(1) * A.to(dtype)).exp()
        new = past * decay + (value * step_size).unsqueeze(1) * B[t].to(dtype)
        out = (new * C[t].to(dtype)).sum(1)
        return new, out if D is None else out + D.to(dtype) * value

    return _recur(token, x.new_empty(x.shape, dtype=dtype), state, step)


def _normed(x: Tensor, l2norm: bool) -> Tensor:
    return x * ((x * x).sum(-1, keepdim=True) + 1e-6).rsqrt() if l2norm else x


def _recur(
    token: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    out: Tensor,
    state: Tensor,
    step: StateStep,
) -> Tensor:
    """Computes ``out`` by ``token(state, row) -> (state, result)``; rows of padding are 0."""
    out.zero_()
    bounds = step.query_start_loc.tolist()
    for request, (slot, length) in enumerate(
        zip(step.slots.tolist(), step.seq_lens.tolist(), strict=True)
    ):
        begin, end = bounds[request], bounds[request + 1]
        if length == 0 or begin == end:
            continue
        has_past = slot != 0 and length > end - begin
        current = state[slot].clone() if has_past else torch.zeros_like(state[0])
        for row in range(begin, end):
            current, out[row] = token(current, row)
        if slot:
            state[slot] = current
    return out
