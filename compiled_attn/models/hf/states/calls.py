"""The functions of transformers that mix the tokens of a sequence, over the states of a step.

Each gets the function itself, the cache argument of the mixer, the number of the call in its layer,
and the arguments of the call. Under any other cache it calls the function.

Shapes are those of transformers, with a batch of 1: ``[1, C, T]`` for convolutions and Mamba 1,
``[1, T, H, D]`` for gated delta nets and Mamba 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compiled_attn.models.hf.states.carrier import LayerStates, StateRecorder

__all__ = ["conv", "delta", "scan", "ssd"]

_SILU = ("silu", "swish")
_NO_LIMIT = (0.0, float("inf"))


def conv(*call: Any, **settings: Any) -> Any:
    """``causal_conv1d_fn``: a causal depthwise convolution, and an activation."""
    return _dispatch(_conv, _record_conv, *call, **settings)


def delta(*call: Any, **settings: Any) -> Any:
    """``torch_chunk_gated_delta_rule``, or ``chunk_kimi_delta_attention`` with more decays."""
    return _dispatch(_delta, _record_delta, *call, **settings)


def ssd(*call: Any, **settings: Any) -> Any:
    """``mamba2_chunk_scan``."""
    return _dispatch(_ssd, _record_ssd, *call, **settings)


def scan(*call: Any, **settings: Any) -> Any:
    """``mamba_selective_scan``."""
    return _dispatch(_scan, _record_scan, *call, **settings)


def _dispatch(
    over_states: Callable[..., Any],
    record: Callable[..., None],
    function: Callable[..., Any],
    cache: Any,
    number: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if isinstance(cache, LayerStates):
        return over_states(cache, number, *args, **kwargs)
    if isinstance(cache, StateRecorder):
        record(cache, number, *args, **kwargs)
    return function(*args, **kwargs)


def _of(cache: LayerStates, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return cache.states[number], cache.slots, cache.seq_lens, cache.query_start_loc


def _conv(
    cache: LayerStates,
    number: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    rows = hidden_states[0].t().to(weight.dtype).contiguous()
    out: Tensor = torch.ops.compiled_attn.state_conv_(
        rows, weight, bias, *_of(cache, number), activation is not None
    )
    return out.t().unsqueeze(0).to(hidden_states.dtype)


def _record_conv(
    cache: StateRecorder,
    number: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> None:
    channels, width = weight.shape
    is_known = activation is None or activation in _SILU
    problem = None if is_known else f"has the activation {activation!r} after its convolution"
    cache.add(number, "conv", (channels, width - 1), weight.dtype, problem)


def _delta(
    cache: LayerStates,
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    q, k, v, rate = [each[0].contiguous() for each in (query, key, value, beta)]
    out: Tensor = torch.ops.compiled_attn.state_delta_(
        q, k, v, g[0].float().contiguous(), rate, *_of(cache, number), use_qk_l2norm_in_kernel, None
    )
    # The second is the last state, which the mixer stores: here in the carrier, which ignores it.
    return out.unsqueeze(0), out


def _record_delta(
    cache: StateRecorder,
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **_: Any,
) -> None:
    cache.add(number, "delta", (value.shape[2], key.shape[3], value.shape[3]))


def _ssd(
    cache: LayerStates,
    number: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    dt = torch.clamp(_step_size(dt, dt_bias, dt_softplus), min=dt_limit[0], max=dt_limit[1])
    # The function returns float32.
    x, dt = [each[0].float().contiguous() for each in (hidden_states, dt)]
    b, c = B[0].contiguous(), C[0].contiguous()
    out: Tensor = torch.ops.compiled_attn.state_ssd_(x, dt, A, b, c, D, *_of(cache, number))
    out = out.unsqueeze(0)
    return (out, out) if return_final_states else out


def _record_ssd(
    cache: StateRecorder,
    number: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    cache.add(number, "ssd", (*hidden_states.shape[2:], B.shape[3]))


def _scan(
    cache: LayerStates,
    number: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    bias = None if delta_bias is None else delta_bias[..., None]
    dt = _step_size(dt, bias, delta_softplus)
    x, dt, b, c = [each[0].t().contiguous() for each in (hidden_states, dt, B, C)]
    x, dt = x.float(), dt.float()
    rows: Tensor = torch.ops.compiled_attn.state_scan_(x, dt, A, b, c, D, *_of(cache, number))
    out = rows.t().unsqueeze(0)
    if z is not None:
        out = out * F.silu(z)
    return (out, out) if return_last_state else out


def _record_scan(
    cache: StateRecorder,
    number: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    cache.add(number, "scan", tuple(A.shape))


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt
