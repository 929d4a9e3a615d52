"""Quantised linear layers for tests, and what they stand for in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.ops.quantised_linear import QuantisedWeight

# Of the formats that are served: bits, groups of scales and of steps (inputs each), kind of steps.
FORMATS = {
    "Q4_0": (4, 32, 0, "none"),
    "Q4_1": (4, 32, 0, "minimum"),
    "Q4_K": (4, 256, 32, "both"),
    "Q5_K": (5, 256, 32, "both"),
    "Q6_K": (6, 256, 16, "factor"),
    "Q8_0": (8, 32, 0, "none"),
    "AWQ": (4, 128, 128, "zero"),
    "int8 by row": (8, 0, 0, "none"),
}


def quantised_layer(
    form: str, outputs: int, inputs: int, seed: int = 0
) -> tuple[QuantisedWeight, Tensor]:
    """A weight of random codes, and its numbers ``[N, K]`` in float64."""
    bits, of_scale, of_step, kind = FORMATS[form]
    chance = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=chance)
    groups = inputs // (of_scale or inputs)
    has_minimum = kind in ("minimum", "both")
    size = (outputs, groups, 2) if has_minimum else (outputs, groups)
    scales = torch.randn(size, generator=chance) * 0.1
    scales = scales.half() if of_scale else scales
    small: tuple[int, ...] = (outputs, inputs // of_step) if of_step else ()
    steps = {
        "both": lambda: torch.randint(0, 64, (*small, 2), generator=chance).byte(),
        "factor": lambda: torch.randint(-128, 128, small, generator=chance).to(torch.int8),
        "zero": lambda: torch.randint(0, 1 << bits, small, generator=chance).byte(),
    }.get(kind, lambda: None)()

    each = scales.double().repeat_interleave(inputs // groups, 1)
    fine = None if steps is None else steps.double().repeat_interleave(of_step, 1)
    middle = float(1 << (bits - 1))
    if kind == "minimum":
        exact = codes * each[..., 0] - each[..., 1]
    elif kind == "both":
        exact = codes * (each * fine)[..., 0] - (each * fine)[..., 1]
    elif kind == "factor":
        exact = (codes - middle) * each * fine
    else:
        exact = (codes - (middle if fine is None else fine)) * each
    return QuantisedWeight.pack(codes, bits, scales, steps), exact


def arguments(weight: QuantisedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """A weight as the ops take it."""
    return weight.codes, weight.scales, weight.steps
