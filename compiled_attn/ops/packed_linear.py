"""The op ``packed_linear``: a linear layer whose weights lie in the order of their use.

Sixteen outputs are a panel; within one, in bfloat16, pairs of inputs follow each other, and in a
pair the outputs. That is what the dot products of AVX-512 (``vdpbf16ps``) and the tiles of AMX
(``tdpbf16ps``) take as it is, so that weights are read once, in the order of their addresses, and
nothing is rearranged. In float32 single inputs follow each other, for multiply-adds. vLLM and
oneDNN pack weights for the same reason; here they take no more memory than before, see
`compiled_attn.models.packed`.

Most models are published in bfloat16. Served in float32, the lower halves of their weights are
zeros; the upper ones alone are read in half of the time, and give the same bits, or with tiles the
same but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "Packing",
    "arranged",
    "as_int8",
    "as_packed",
    "can_pack",
    "can_quantise",
    "fake",
    "fake_all",
    "fake_gated",
    "fake_rows",
    "halve",
    "has_halves",
    "is_packed",
    "pack",
    "quantise",
    "reference",
    "reference_all",
    "reference_gated",
    "rows",
    "unpack",
]

_PANEL = 16
_INPUTS = 32  # of a tile
_ROWS_AT_ONCE = 1024  # of a weight that is looked at
_GREATEST = 127.0
_TOGETHER = {  # inputs of an output
    torch.bfloat16: 2,
    torch.int8: 2,
    torch.int16: 2,
    torch.float32: 1,
}

Packing = Literal["packed", "halves", "int8"]
"""How a weight is kept: of its dtype, as upper halves of float32, or quantised."""


def can_pack(weight: Tensor) -> bool:
    """Whether ``weight [N, K]`` has the dtype and the sizes of the op: whole tiles on the CPU."""
    return (
        weight.dtype in (torch.bfloat16, torch.float32)
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.shape[0] % _PANEL == 0
        and weight.shape[1] % _INPUTS == 0
        and weight.numel() > 0
    )


def can_quantise(weight: Tensor) -> bool:
    """Whether it can be packed in int8, of which the op computes in bfloat16."""
    return weight.dtype is torch.bfloat16 and can_pack(weight)


def has_halves(weight: Tensor) -> bool:
    """Whether a weight that can be packed is float32 whose lower halves are zeros."""
    if not can_pack(weight) or weight.dtype is not torch.float32:
        return False
    bits = weight.detach().view(torch.int32)
    return not any((part & 0xFFFF).any() for part in bits.split(_ROWS_AT_ONCE))


def as_packed(weight: Tensor) -> Packing | None:
    """All weights that can be packed, of their dtype."""
    return "packed" if can_pack(weight) else None


def as_int8(weight: Tensor) -> Packing | None:
    """All weights that can be int8."""
    return "int8" if can_quantise(weight) else None


def is_packed(weight: Tensor) -> bool:
    """Whether a weight has the order of its dtype, and has not been cast since."""
    return weight.dim() == 4 and weight.shape[-1] == _TOGETHER.get(weight.dtype)


def pack(weight: Tensor) -> Tensor:
    """``weight [N, K]`` in the order of the op: a copy.

    Returns:
        ``[N / 16, K / 2, 16, 2]`` of bfloat16, ``[N / 16, K, 16, 1]`` of float32.

    Raises:
        ValueError: the op does not take such a weight, see `can_pack`.
    """
    if not can_pack(weight):
        raise ValueError(
            "expected a bfloat16 or float32 weight [N, K] on the CPU with "
            f"N % {_PANEL} == 0 and K % {_INPUTS} == 0, got {weight.dtype} {[*weight.shape]} "
            f"on {weight.device}: leave it as it is"
        )
    return arranged(weight, _TOGETHER[weight.dtype])


def halve(weight: Tensor) -> Tensor:
    """The upper halves of ``weight [N, K]`` float32 in the order of the op: a copy.

    Returns:
        ``[N / 16, K / 2, 16, 2]`` int16, of which `unpack` gives the very weight back.

    Raises:
        ValueError: the lower halves are not zeros, see `has_halves`.
    """
    if not has_halves(weight):
        raise ValueError(
            "expected a float32 weight that can be packed and that bfloat16 holds exactly, got "
            f"{weight.dtype} {[*weight.shape]} that is another: pack it as it is"
        )
    upper = weight.view(torch.int32) >> 16
    return arranged(upper.to(torch.int16), _TOGETHER[torch.int16])


def arranged(weight: Tensor, together: int) -> Tensor:
    """``weight [N, K]`` of any dtype in that order, ``[N / 16, K / together, 16, together]``."""
    outputs, inputs = weight.shape
    tiles = weight.reshape(outputs // _PANEL, _PANEL, inputs // together, together)
    return tiles.transpose(1, 2).contiguous()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight [N, K]`` in int8, symmetric, with a scale for each output.

    The greatest of an output becomes 127, the others are rounded to nearest.

    Returns:
        ``[N / 16, K / 2, 16, 2]`` int8 in the order of the op, and ``scale [N]`` float32.
    """
    wide = weight.float()
    scale = wide.abs().amax(1) / _GREATEST
    codes = (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round()
    return arranged(codes.to(torch.int8), _TOGETHER[torch.int8]), scale


def unpack(weight: Tensor) -> Tensor:
    """The weight ``[N, K]`` that ``weight [N / 16, K / 2, 16, 2]`` was packed from: a copy.

    So it is of ``[N / 16, K, 16, 1]``. Of halves it is float32, of int8 the codes.
    """
    panels, groups, _, together = weight.shape
    return _whole(weight.transpose(1, 2).reshape(panels * _PANEL, together * groups))


def _whole(weight: Tensor) -> Tensor:
    """Floats of halves, and anything else as it is."""
    return weight.view(torch.bfloat16).float() if weight.dtype is torch.int16 else weight


def rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows ``ids [...]`` of what was packed, ``[..., K]``: an embedding that a head shares."""
    return _whole(weight[ids // _PANEL, :, ids % _PANEL].flatten(-2))


def reference(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """``(input @ unpack(weight).T) * scale + bias``, sums in float32, rounded once.

    Args:
        input: ``[M, K]`` bfloat16 or float32, rows of any stride.
        weight: of that dtype, of `pack`; or under an input of bfloat16 int8, of `quantise`; or
            under one of float32 int16, of `halve`.
        bias: ``[N]`` of the input's dtype.
        scale: ``[N]`` float32, of `quantise`; None for a weight of `pack`.

    Returns:
        ``[M, N]`` of the input's dtype.
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


def reference_gated(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], scales: Sequence[Tensor]
) -> Tensor:
    """``silu(gate) * up`` of two layers of one input (SwiGLU, Shazeer 2020), rounded once more.

    Raises:
        ValueError: they are not two, or differ in their outputs.
    """
    _check_gated(weights)
    gate, up = reference_all(input, weights, biases, scales)
    return (functional.silu(gate.float()) * up.float()).to(input.dtype)


def fake_gated(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], scales: Sequence[Tensor]
) -> Tensor:
    """The result's shape."""
    _check_gated(weights)
    return fake(input, weights[0])


def _check_gated(weights: Sequence[Tensor]) -> None:
    outputs = [weight.shape[0] * _PANEL for weight in weights]
    if len(outputs) != 2 or outputs[0] != outputs[1]:
        raise ValueError(
            "packed_gated: expected weights of two layers with as many outputs each, got "
            f"{outputs}: pass the gate, then what it is for"
        )


def _layers(weights: Sequence[Tensor], *others: Sequence[Tensor]) -> Any:
    missing = [None] * len(weights)
    return zip(weights, *(each or missing for each in others), strict=True)


def fake_rows(weight: Tensor, ids: Tensor) -> Tensor:
    """The shape of `rows`."""
    return _whole(weight.new_empty(ids.shape[0], weight.shape[1] * weight.shape[3]))
