"""The op ``packed_linear``: a linear layer of bfloat16 whose weights lie in the order of their use.

Sixteen outputs are a panel; within one, pairs of inputs follow each other, and in a pair the
outputs. That is what the dot products of AVX-512 (``vdpbf16ps``) and the tiles of AMX
(``tdpbf16ps``) take as it is, so that weights are read once, in the order of their addresses, and
nothing is rearranged. vLLM and oneDNN pack weights for the same reason; here they take no more
memory than before, see `compiled_attn.hf.packed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "arranged",
    "can_pack",
    "fake",
    "fake_all",
    "fake_rows",
    "pack",
    "quantise",
    "reference",
    "reference_all",
    "rows",
    "unpack",
]

_PANEL = 16
_INPUTS = 32  # of a tile
_GREATEST = 127.0


def can_pack(weight: Tensor) -> bool:
    """Whether ``weight [N, K]`` has the dtype and the sizes of the op: whole tiles on the CPU."""
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.shape[0] % _PANEL == 0
        and weight.shape[1] % _INPUTS == 0
        and weight.numel() > 0
    )


def pack(weight: Tensor) -> Tensor:
    """``weight [N, K]`` in the order of the op, ``[N / 16, K / 2, 16, 2]``: a copy.

    Raises:
        ValueError: the op does not take such a weight, see `can_pack`.
    """
    if not can_pack(weight):
        raise ValueError(
            f"expected a bfloat16 weight [N, K] on the CPU with N % {_PANEL} == 0 and K % {_INPUTS}"
            f" == 0, got {weight.dtype} {[*weight.shape]} on {weight.device}: leave it as it is"
        )
    return arranged(weight)


def arranged(weight: Tensor) -> Tensor:
    """``weight [N, K]`` of whole panels and any dtype in that order, ``[N / 16, K / 2, 16, 2]``."""
    outputs, inputs = weight.shape
    panels = weight.reshape(outputs // _PANEL, _PANEL, inputs // 2, 2).transpose(1, 2)
    return panels.contiguous()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight [N, K]`` in int8, symmetric, with a scale for each output.

    The greatest of an output becomes 127, the others are rounded to nearest.

    Returns:
        ``[N / 16, K / 2, 16, 2]`` int8 in the order of the op, and ``scale [N]`` float32.
    """
    wide = weight.float()
    scale = wide.abs().amax(1) / _GREATEST
    codes = (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round()
    return arranged(codes.to(torch.int8)), scale


def unpack(weight: Tensor) -> Tensor:
    """The weight ``[N, K]`` that ``weight [N / 16, K / 2, 16, 2]`` was packed from: a copy."""
    panels, pairs = weight.shape[:2]
    return weight.transpose(1, 2).reshape(panels * _PANEL, 2 * pairs)


def rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows ``ids [...]`` of what was packed, ``[..., K]``: an embedding that a head shares."""
    return weight[ids // _PANEL, :, ids % _PANEL].flatten(-2)


def reference(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """``(input @ unpack(weight).T) * scale + bias``, sums in float32, rounded once.

    Args:
        input: ``[M, K]`` bfloat16, rows of any stride.
        weight: ``[N / 16, K / 2, 16, 2]`` bfloat16, of `pack`; or int8, of `quantise`.
        bias: ``[N]`` bfloat16.
        scale: ``[N]`` float32, of `quantise`; None for a weight of bfloat16.

    Returns:
        ``[M, N]`` bfloat16.
    """
    sums = functional.linear(input.float(), unpack(weight).float())
    if scale is not None:
        sums = sums * scale
    if bias is not None:
        sums = sums + bias.float()
    return sums.to(input.dtype)


def fake(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """The result's shape."""
    return input.new_empty(input.shape[0], weight.shape[0] * _PANEL)


def reference_all(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], scales: Sequence[Tensor]
) -> list[Tensor]:
    """`reference` for each of some layers of one input; ``biases``, ``scales``: of all or none."""
    return [reference(input, *layer) for layer in _layers(weights, biases, scales)]


def fake_all(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], scales: Sequence[Tensor]
) -> list[Tensor]:
    """The results' shapes."""
    return [fake(input, *layer) for layer in _layers(weights, biases, scales)]


def _layers(weights: Sequence[Tensor], *others: Sequence[Tensor]) -> Any:
    missing = [None] * len(weights)
    return zip(weights, *(each or missing for each in others), strict=True)


def fake_rows(weight: Tensor, ids: Tensor) -> Tensor:
    """The shape of `rows`."""
    return weight.new_empty(ids.shape[0], weight.shape[1] * 2)
