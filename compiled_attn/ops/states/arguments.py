"""Argument checks of the reference; those of C++ are in ``cpu/csrc/state/state_ops.h``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.arguments import FLOATS, Expect
from compiled_attn.errors import KernelArgumentError

__all__ = ["StateStep", "check_conv", "check_delta", "check_scan", "check_ssd"]

_STATES = (torch.float32, torch.float64)
_INT32 = (torch.int32,)


class StateStep(NamedTuple):
    """Tables of a step: ``slots [R]``, ``seq_lens [R]``, ``query_start_loc [R + 1]``, all int32."""

    slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor


def check_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, step: StateStep
) -> None:
    """Raises KernelArgumentError unless arguments of ``state_conv_`` fit."""
    expect = _expect("state_conv_")
    expect.tensor("x", x, "[T, C]", (None, None), FLOATS)
    channels, same = x.shape[1], (x.dtype,)
    expect.tensor("weight", weight, "[C, K]", (channels, None), same, x)
    expect(weight.shape[1] > 0, "weight of at least one tap", weight.shape, "give it one")
    if bias is not None:
        expect.tensor("bias", bias, "[C]", (channels,), same, x)
    shape = (None, channels, weight.shape[1] - 1)
    expect.tensor("state", state, "[S, C, K - 1]", shape, same, x)
    _check_step(expect, x, state, step, x=x, weight=weight, bias=bias)


def check_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, step: StateStep
) -> None:
    """Raises KernelArgumentError unless arguments of ``state_delta_`` fit."""
    expect = _expect("state_delta_")
    expect.tensor("q", q, "[T, Hk, Dk]", (None, None, None), FLOATS)
    tokens, _, keys = q.shape
    expect.tensor("k", k, "[T, Hk, Dk]", q.shape, FLOATS, q)
    expect.tensor("v", v, "[T, Hv, Dv]", (tokens, None, None), FLOATS, q)
    heads = v.shape[1]
    _check_groups(expect, "q and k", q.shape[1], heads)
    by_channel = (keys,) if g.dim() == 3 else ()
    expect.tensor("g", g, "[T, Hv] or [T, Hv, Dk]", (tokens, heads, *by_channel), FLOATS, q)
    expect.tensor("beta", beta, "[T, Hv]", (tokens, heads), FLOATS, q)
    shape = (None, heads, keys, v.shape[2])
    expect.tensor("state", state, "[S, Hv, Dk, Dv]", shape, _STATES, q)
    _check_step(expect, q, state, step, q=q, k=k, v=v, g=g, beta=beta)


def check_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor,
    step: StateStep,
) -> None:  # fmt: skip
    """Raises KernelArgumentError unless arguments of ``state_ssd_`` fit."""
    expect = _expect("state_ssd_")
    expect.tensor("x", x, "[T, H, P]", (None, None, None), FLOATS)
    tokens, heads, dim = x.shape
    expect.tensor("dt", dt, "[T, H]", (tokens, heads), _STATES, x)
    expect.tensor("A", A, "[H]", (heads,), FLOATS, x)
    expect.tensor("B", B, "[T, G, N]", (tokens, None, None), FLOATS, x)
    expect.tensor("C", C, "[T, G, N]", B.shape, FLOATS, x)
    _check_groups(expect, "B and C", B.shape[1], heads)
    if D is not None:
        expect.tensor("D", D, "[H]", (heads,), FLOATS, x)
    shape = (None, heads, dim, B.shape[2])
    expect.tensor("state", state, "[S, H, P, N]", shape, _STATES, x)
    _check_step(expect, x, state, step, x=x, dt=dt, A=A, B=B, C=C, D=D)


def check_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor,
    step: StateStep,
) -> None:  # fmt: skip
    """Raises KernelArgumentError unless arguments of ``state_scan_`` fit."""
    expect = _expect("state_scan_")
    expect.tensor("x", x, "[T, C]", (None, None), FLOATS)
    tokens, channels = x.shape
    expect.tensor("dt", dt, "[T, C]", (tokens, channels), _STATES, x)
    expect.tensor("A", A, "[C, N]", (channels, None), FLOATS, x)
    expect.tensor("B", B, "[T, N]", (tokens, A.shape[1]), FLOATS, x)
    expect.tensor("C", C, "[T, N]", (tokens, A.shape[1]), FLOATS, x)
    if D is not None:
        expect.tensor("D", D, "[C]", (channels,), FLOATS, x)
    expect.tensor("state", state, "[S, C, N]", (None, *A.shape), _STATES, x)
    _check_step(expect, x, state, step, x=x, dt=dt, A=A, B=B, C=C, D=D)


def _expect(op: str) -> Expect:
    return Expect(KernelArgumentError, KernelArgumentError, f"{op}: ")


def _check_groups(expect: Expect, name: str, groups: int, heads: int) -> None:
    fits = groups > 0 and heads % groups == 0
    expect(fits, f"{name} whose heads divide {heads}", groups, "match the heads")


def _check_step(
    expect: Expect, rows: Tensor, state: Tensor, step: StateStep, **inputs: Tensor | None
) -> None:
    slots, seq_lens, starts = step
    expect.tensor("slots", slots, "[R]", (None,), _INT32, rows)
    requests = slots.shape[0]
    expect.tensor("seq_lens", seq_lens, "[R]", (requests,), _INT32, rows)
    expect.tensor("query_start_loc", starts, "[R + 1]", (requests + 1,), _INT32, rows)
    expect.contiguous(state=state)
    expect.apart({"state": state}, inputs | step._asdict())
    bounds = starts.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        begin, end, slot = bounds[request], bounds[request + 1], int(slots[request])
        expect(
            0 <= begin <= end <= len(rows),
            f"rows of request {request} in 0..{len(rows)}, in order",
            f"{begin}..{end}",
            "query_start_loc is a running sum that ends at the tokens of the step",
        )
        expected = f"seq_lens[{request}] of 0 or at least its {end - begin} rows"
        remedy = "it counts the tokens after this step"
        expect(length == 0 or length >= end - begin, expected, length, remedy)
        last = len(state) - 1
        expect(0 <= slot <= last, f"slots[{request}] in 0..{last}", slot, "padding has slot 0")
