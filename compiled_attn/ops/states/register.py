"""What `compiled_attn.ops.paged_attention` registers for the state ops besides C++.

The ops compute the recurrent part of hybrid layers for a step of requests, ``T`` rows and ``R``
requests, and update ``state`` in place. Row ranges come from ``query_start_loc [R + 1]``; tokens
after the step, 0 for padding, from ``seq_lens [R]``; the row of ``state`` from ``slots [R]``, all
int32. A request continues from its slot iff it has more tokens than rows in this step; otherwise
its slot is not read. Slot 0 is neither read nor written, rows of padding return zeros, and requests
with rows must have different slots. Inputs are float32, bfloat16 or float16; out is float32 where
nothing else is said:

- ``state_conv_(x [T, C], weight [C, K], bias [C] or None, state [S, C, K - 1], ..., silu)``, out
  ``[T, C]``: everything in the dtype of ``x``.
- ``state_delta_(q, k [T, Hk, Dk], v [T, Hv, Dv], g [T, Hv] or [T, Hv, Dk], beta [T, Hv], state
  [S, Hv, Dk, Dv], ..., l2norm, scale)``, out ``[T, Hv, Dv]`` in the dtype of ``v``: ``g`` is the
  logarithm of a decay, at most 0; ``scale`` of ``q`` is by default ``Dk ** -0.5``.
- ``state_ssd_(x [T, H, P], dt [T, H], A [H], B, C [T, G, N], D [H] or None, state [S, H, P, N],
  ...)``, out ``[T, H, P]``: ``dt`` is float32, after bias, softplus and clamp; ``A`` is at most 0.
- ``state_scan_(x [T, C], dt [T, C], A [C, N], B, C [T, N], D [C] or None, state [S, C, N], ...)``,
  out ``[T, C]``: the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from compiled_attn.ops.states import reference

__all__ = ["FAKES", "IN_PYTHON"]

IN_PYTHON: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {name: getattr(reference, name) for name in reference.__all__}
)
"""The references by name of the op."""


def _fake_conv(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_delta(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


def _fake_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor, *_: Any
) -> Tensor:
    return x.new_empty(x.shape, dtype=state.dtype)


FAKES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "state_conv_": _fake_conv,
        "state_delta_": _fake_delta,
        "state_ssd_": _fake_scan,
        "state_scan_": _fake_scan,
    }
)
"""What compilers see of the ops."""
