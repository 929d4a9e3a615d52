"""Layers with states: drawn inputs of each op, and steps of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compiled_attn.ops import NativeOps
from compiled_attn.ops.paged_attention import call_op
from compiled_attn.ops.states.register import IN_PYTHON

SLOTS = 7


@dataclass(frozen=True)
class Layer:
    """Inputs of an op for some tokens of one request.

    Attributes:
        op: its name.
        rows: inputs by argument, ``[T, ...]``.
        weights: inputs that all tokens share, by argument.
        state_shape: of one slot.
        state_dtype: of states.
        options: arguments after the tables.
        order: names of rows and weights as the op takes them.
    """

    op: str
    rows: dict[str, Tensor]
    weights: dict[str, Tensor | None]
    state_shape: tuple[int, ...]
    state_dtype: torch.dtype
    order: tuple[str, ...]
    options: tuple[Any, ...] = ()

    def tokens(self, begin: int, end: int | None = None) -> Layer:
        return replace(self, rows={name: each[begin:end] for name, each in self.rows.items()})

    def to_double(self) -> Layer:
        rows = {name: each.double() for name, each in self.rows.items()}
        weights = {
            name: each if each is None else each.double() for name, each in self.weights.items()
        }
        return replace(self, rows=rows, weights=weights, state_dtype=torch.float64)

    def state(self, value: float = torch.nan) -> Tensor:
        return torch.full((SLOTS, *self.state_shape), value, dtype=self.state_dtype)

    def arguments(self, state: Tensor, step: Sequence[Tensor]) -> list[Any]:
        inputs = self.rows | self.weights
        return [*(inputs[name] for name in self.order), state, *step, *self.options]


def concatenated(layers: Sequence[Layer], padding: int = 0) -> Layer:
    """Rows of several requests of one layer, then rows of NaN."""
    rows = {name: torch.cat([each.rows[name] for each in layers]) for name in layers[0].rows}
    rows = {name: torch.cat([each, each.new_full((padding, *each.shape[1:]), torch.nan)])
            for name, each in rows.items()}  # fmt: skip
    return replace(layers[0], rows=rows)


def tables(requests: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Slots, lengths and starts of requests of (rows, tokens after the step, slot)."""
    rows, lengths, slots = (
        torch.tensor(each, dtype=torch.int32) for each in zip(*requests, strict=True)
    )
    return [slots, lengths, torch.cat([rows.new_zeros(1), rows.cumsum(0)]).int()]


def run(ops: NativeOps | None, layer: Layer, state: Tensor, step: Sequence[Tensor]) -> Tensor:
    """Calls the op; None: the reference as it is, for float64."""
    space = IN_PYTHON if ops is None else None
    op = space[layer.op] if space else getattr(getattr(torch.ops, ops.namespace), layer.op)
    return call_op(op, *layer.arguments(state, step))


def alone(ops: NativeOps | None, layer: Layer) -> tuple[Tensor, Tensor]:
    """The rows of a new request in one step, and its state."""
    state = layer.state()
    count = len(next(iter(layer.rows.values())))
    out = run(ops, layer, state, tables([(count, count, 3)]))
    return out, state[3]


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    bits = (each.contiguous().flatten().view(torch.uint8) for each in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


class Draw:
    """Draws inputs of a dtype."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self._chance = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._chance).to(dtype or self.dtype)

    def positive(self, *shape: int) -> Tensor:
        return self(*shape, dtype=torch.float32).abs()


def conv(draw: Draw, tokens: int, channels: int, taps: int, bias: bool, silu: bool) -> Layer:
    weights = {"weight": draw(channels, taps), "bias": draw(channels) if bias else None}
    # Rows as a projection of several things leaves them: part of a wider row.
    x = draw(tokens, channels + 8)[:, 8:]
    order = ("x", "weight", "bias")
    shape = (channels, taps - 1)
    return Layer("state_conv_", {"x": x}, weights, shape, draw.dtype, order, (silu,))


def delta(
    draw: Draw, tokens: int, key_heads: int, heads: int, keys: int, values: int,
    by_channel: bool = False, l2norm: bool = True,
) -> Layer:  # fmt: skip
    channels = (keys,) if by_channel else ()
    q, k = (draw(tokens, key_heads, keys) for _ in range(2))
    if not l2norm:  # keys of norm 1 keep the state bounded
        k = k / k.float().norm(dim=-1, keepdim=True).to(k.dtype)
    rows = {
        "q": q, "k": k, "v": draw(tokens, heads, values + 3)[:, :, 3:],
        "g": -draw.positive(tokens, heads, *channels), "beta": draw(tokens, heads).sigmoid(),
    }  # fmt: skip
    shape = (heads, keys, values)
    return Layer("state_delta_", rows, {}, shape, torch.float32, tuple(rows), (l2norm, None))


def ssd(draw: Draw, tokens: int, heads: int, dim: int, groups: int, size: int, d=True) -> Layer:
    rows = {
        "x": draw(tokens, heads, dim), "dt": draw.positive(tokens, heads),
        "B": draw(tokens, groups, size), "C": draw(tokens, groups, size),
    }  # fmt: skip
    weights = {"A": -draw.positive(heads), "D": draw(heads) if d else None}
    order = ("x", "dt", "A", "B", "C", "D")
    return Layer("state_ssd_", rows, weights, (heads, dim, size), torch.float32, order)


def scan(draw: Draw, tokens: int, channels: int, size: int, d: bool = True) -> Layer:
    both = draw(tokens, 2 * size)
    rows = {
        "x": draw(tokens, channels), "dt": draw.positive(tokens, channels),
        "B": both[:, :size], "C": both[:, size:],
    }  # fmt: skip
    weights = {"A": -draw.positive(channels, size), "D": draw(channels) if d else None}
    order = ("x", "dt", "A", "B", "C", "D")
    return Layer("state_scan_", rows, weights, (channels, size), torch.float32, order)


Make = Callable[[Draw, int], Layer]
LAYERS: dict[str, Make] = {
    "conv of 4 taps": lambda draw, n: conv(draw, n, 300, 4, bias=False, silu=True),
    "conv of 3 taps": lambda draw, n: conv(draw, n, 37, 3, bias=True, silu=False),
    "conv of 2 taps": lambda draw, n: conv(draw, n, 16, 2, bias=True, silu=True),
    "conv of 1 tap": lambda draw, n: conv(draw, n, 5, 1, bias=False, silu=False),
    "delta": lambda draw, n: delta(draw, n, 2, 4, 16, 24),
    "delta of whole panels": lambda draw, n: delta(draw, n, 1, 2, 40, 128),
    "delta, 3 values a key head": lambda draw, n: delta(draw, n, 2, 6, 5, 7),
    "delta without norm": lambda draw, n: delta(draw, n, 2, 2, 33, 80, l2norm=False),
    "delta by channel": lambda draw, n: delta(draw, n, 2, 2, 24, 16, by_channel=True),
    "ssd": lambda draw, n: ssd(draw, n, 4, 8, 2, 16),
    "ssd of odd sizes": lambda draw, n: ssd(draw, n, 6, 37, 3, 7, d=False),
    "ssd of one group": lambda draw, n: ssd(draw, n, 2, 64, 1, 48),
    "scan": lambda draw, n: scan(draw, n, 70, 16),
    "scan of odd sizes": lambda draw, n: scan(draw, n, 9, 5, d=False),
    "scan of 24": lambda draw, n: scan(draw, n, 33, 24),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
