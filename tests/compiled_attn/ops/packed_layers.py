"""Packed linear layers for tests."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from compiled_attn.ops import NativeOps, packed_linear
from tests.compiled_attn.ops.kernels import tuned

# Around a tile, two of them, and as many rows as are taken at once.
ROWS = [1, 2, 5, 8, 13, 15, 16, 17, 31, 33, 48, 63, 64, 257]
SIZES = [(16, 32), (48, 96), (80, 64), (144, 576), (16 * 13, 32)]


def bf16_weights_by(kind: str, ops: NativeOps) -> AbstractContextManager[NativeOps]:
    """The kernels, which compute layers of bf16-widen with a kind of dot products meanwhile."""
    return tuned(ops, linear_bf16_weights=kind)


def layer(
    rows: int, outputs: int, inputs: int, seed: int = 0, kind: str = "bfloat16"
) -> tuple[torch.Tensor, ...]:
    """Input, plain weight and bias, of the dtype that goes with a kind of packed weights."""
    chance = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if kind in ("float32", "bf16-widen") else torch.bfloat16
    input, weight, bias = (
        torch.randn(shape, generator=chance).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    return input, weight.bfloat16().float() if kind == "bf16-widen" else weight, bias


KINDS = ["bfloat16", "float32", "bf16-widen"]


def packed_as(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight packed."""
    return (packed_linear.pack_bf16 if kind == "bf16-widen" else packed_linear.pack)(weight)


def assert_product(out, input, weight, bias=None) -> None:
    """Against the product in float64."""
    expected = input.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = input.double().abs() @ weight.double().abs().T
    # Half a unit in the last place of bfloat16, and rounding of the sums in float32.
    rounding = 2**-8 if input.dtype is torch.bfloat16 else 0
    assert out.dtype is input.dtype
    assert ((out.double() - expected).abs() <= expected.abs() * rounding + size * 2e-6).all()
