"""Linear layers with weights of 4 and 8 bits on a device, next to torch's of 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerator.timing import Kernel, medians
from compiled_attn.ops.quantised_linear import QuantisedWeight, quantise

__all__ = ["LAYERS", "ROWS", "SMALL_LAYERS", "layer_rows", "why_not"]

LAYERS = {"QKV, 8 B": (6144, 4096), "down, 8 B": (4096, 14336), "gate-up, 1 B": (16384, 2048)}
"""Outputs and inputs."""
SMALL_LAYERS = {"tiny": (64, 64)}
ROWS = (1, 16, 64, 512)
_SETS = 4  # of weights, read in turns: cold
_BITS = (4, 8)
_TOLERANCE = 0.02  # of the largest output: bfloat16 rounds to 1/256


def why_not(device: torch.device) -> str | None:
    """Why packed weights have no op on a device, or None."""
    key = {"cuda": "CUDA", "cpu": "CPU"}.get(device.type, "PrivateUse1")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has("compiled_attn::quantised_linear", key):
        return None
    return f"quantised_linear has no kernel for {device.type}"


def layer_rows(
    name: str, shape: tuple[int, int], device: torch.device, rounds: int, calls: int
) -> Iterator[dict[str, Any]]:
    """Seconds of a layer for each of `ROWS`: bfloat16 by torch, and ours by bits.

    Raises:
        AssertionError: a result is wrong.
    """
    weight = (torch.randn(shape) * 0.02).bfloat16()
    dense = [weight.to(device, copy=True) for _ in range(_SETS)]
    quantised = {bits: quantise(weight, bits) for bits in _BITS}
    packed = {bits: [_on(device, each) for _ in range(_SETS)] for bits, each in quantised.items()}
    for rows in ROWS:
        input = torch.randn(rows, shape[1]).bfloat16().to(device)
        kernels: dict[str, Kernel] = {"bfloat16": partial(_dense, input, dense)}
        for bits, each in quantised.items():
            run = kernels[f"{bits} bits"] = partial(_packed, input, packed[bits])
            exact = F.linear(input.float().cpu(), each.dequantise())
            error = float((run(0).float().cpu() - exact).abs().max() / exact.abs().max())
            assert error < _TOLERANCE, f"{name}, {bits} bits: off by {error:.3f}"
        seconds, _ = medians(kernels, rounds, calls, device)
        yield {"layer": name, "rows": rows, "seconds": seconds}


def _dense(input: Tensor, weights: list[Tensor], number: int) -> Tensor:
    return F.linear(input, weights[number % _SETS])


def _packed(input: Tensor, weights: list[tuple[Tensor, ...]], number: int) -> Tensor:
    out: Tensor = torch.ops.compiled_attn.quantised_linear(input, *weights[number % _SETS])
    return out


def _on(device: torch.device, weight: QuantisedWeight) -> tuple[Tensor, ...]:
    parts = weight.codes, weight.scales, weight.steps
    return tuple(each.to(device, copy=True) for each in parts)
