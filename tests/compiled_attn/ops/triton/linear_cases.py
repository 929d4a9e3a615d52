"""Quantised linear layers for tests of their Triton kernels, and bounds of their rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_attn.ops.quantised_linear import QuantisedWeight, round_inputs
from tests.compiled_attn.ops.quantised_layers import FORMATS, arguments, quantised_layer

__all__ = ["FORMATS", "Case", "assert_right"]

_DIGITS = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Case:
    """A layer and its input: format, rows, outputs, inputs, dtype, and what else it has."""

    form: str = "Q4_0"
    rows: int = 5
    outputs: int = 80
    inputs: int = 160
    dtype: torch.dtype = torch.bfloat16
    biased: bool = False
    int8_inputs: bool = False
    seed: int = 0

    def made(self) -> tuple[tuple[Any, ...], Tensor, QuantisedWeight]:
        """The arguments of the op, the exact weight in float64, and the packed one."""
        weight, exact = quantised_layer(self.form, self.outputs, self.inputs, self.seed)
        chance = torch.Generator().manual_seed(self.seed)
        input = torch.randn(self.rows, self.inputs, generator=chance).to(self.dtype)
        bias = torch.randn(self.outputs, generator=chance).to(self.dtype) if self.biased else None
        return (input, *arguments(weight), bias, self.int8_inputs), exact, weight


def assert_right(out: Tensor, case: Case) -> None:
    """Against the product in float64 of the weight that the format stands for.

    Weights and rounded inputs are rounded to the dtype of the input, as the result is.
    """
    (input, *_, bias, int8_inputs), exact, _ = case.made()
    rows = round_inputs(input).double() if int8_inputs else input.double()
    expected = rows @ exact.T + (0 if bias is None else bias.double())
    size = rows.abs() @ exact.abs().T
    digits = _DIGITS[case.dtype]
    # Where a quotient is halfway between two integers, an input may be rounded to either.
    steps = input.double().unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 127
    ties = (steps * _is_tie(input)) @ exact.abs().T if int8_inputs else 0
    smallest = exact.abs().amax() * rows.abs().sum(1, keepdim=True)
    bound = expected.abs() * digits + size * (2 * digits + 1e-6) + smallest * 1e-6 + ties
    assert out.dtype is case.dtype and out.shape == expected.shape
    assert ((out.double() - expected).abs() <= bound).all()


def _is_tie(input: Tensor) -> Tensor:
    """Which inputs are so close to halfway between two steps that either is right."""
    blocks = input.double().unflatten(-1, (-1, 32))
    quotient = blocks / (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-300)
    return (((quotient - quotient.floor()) - 0.5).abs() < 1e-4).flatten(-2)
