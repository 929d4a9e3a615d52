"""The op ``packed_linear``: a linear layer with weights packed in the order of their use.

A panel is 16 outputs. In bfloat16 it holds pairs of inputs, each for all 16 outputs: operands of
AVX-512 dot products (``vdpbf16ps``) and AMX tiles (``tdpbf16ps``) as they are, so weights are read
once, in address order. In float32 it holds single inputs, for multiply-adds. Packed weights replace
the originals, see `compiled_attn.models.packed`.

Most models are published in bfloat16, which therefore stores their float32 weights exactly, in half
the memory ("bf16-widen"): results have the same bits (with AMX, the same but for rounding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "BITS_OF", "EXACT_INPUTS", "Packing", "arrange", "as_packed", "as_rounded", "can_pack",
    "can_round",
    "check_swiglu", "fake", "fake_all", "fake_rows", "fake_swiglu", "fits_bf16", "is_packed",
    "pack", "pack_bf16", "reference", "reference_all", "reference_swiglu", "rows", "unpack",
]  # fmt: skip

_PANEL = 16
_INPUTS = 32  # of a tile
_ROWS_AT_ONCE = 1024  # bounds temporary memory
# Adjacent inputs of an output.
_GROUP = {torch.bfloat16: 2, torch.int16: 2, torch.float32: 1}

Packing = Literal["packed", "bf16-widen", "int4", "int8", "w4a16", "w8a16"]
"""How a weight is stored: in its dtype, as bfloat16 widened to float32 when read, or rounded to the
nearest of 4 or 8 bits (`compiled_attn.ops.quantised_linear.quantise`)."""

BITS_OF: Mapping[str, int] = MappingProxyType({"int4": 4, "int8": 8, "w4a16": 4, "w8a16": 8})
"""Bits of the packings that round."""

EXACT_INPUTS = frozenset({"w4a16", "w8a16"})
"""Those that multiply inputs as they are; the others round them to int8, as llama.cpp does."""


def can_pack(weight: Tensor) -> bool:
    """Whether the op supports ``weight [N, K]``: whole tiles of bfloat16 or float32 on the CPU."""
    return (
        weight.dtype in (torch.bfloat16, torch.float32)
        and weight.device.type == "cpu"
        and _has_tiles(weight)
    )


def can_round(weight: Tensor) -> bool:
    """Whether ``weight [N, K]`` can be rounded to one of `BITS_OF`: float16 too on devices."""
    is_half = weight.dtype is torch.float16 and weight.device.type != "cpu"
    is_dtype = is_half or weight.dtype in (torch.bfloat16, torch.float32)
    return is_dtype and _has_tiles(weight)


def _has_tiles(weight: Tensor) -> bool:
    return (
        weight.dim() == 2
        and weight.shape[0] % _PANEL == 0
        and weight.shape[1] % _INPUTS == 0
        and weight.numel() > 0
    )


def fits_bf16(weight: Tensor) -> bool:
    """Whether a weight can be packed, is float32, and bfloat16 represents it exactly."""
    if not can_pack(weight) or weight.dtype is not torch.float32:
        return False
    bits = weight.detach().view(torch.int32)
    return not any((part & 0xFFFF).any() for part in bits.split(_ROWS_AT_ONCE))


def as_packed(weight: Tensor) -> Packing | None:
    """Selects the packing of all weights that can be packed, in their dtype."""
    return "packed" if can_pack(weight) else None


@cache
def as_rounded(packing: Packing) -> Callable[[Tensor], Packing | None]:
    """Returns what selects one of `BITS_OF` for all weights that can be rounded."""
    return lambda weight: packing if can_round(weight) else None


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is packed, and has not been cast since."""
    return weight.dim() == 4 and weight.shape[-1] == _GROUP.get(weight.dtype)


def pack(weight: Tensor) -> Tensor:
    """Packs ``weight [N, K]``: bfloat16 ``[N / 16, K / 2, 16, 2]``, float32 ``[N / 16, K, 16, 1]``.

    Raises:
        ValueError: unsupported weight, see `can_pack`.
    """
    if not can_pack(weight):
        raise ValueError(
            "expected a bfloat16 or float32 weight [N, K] on the CPU with "
            f"N % {_PANEL} == 0 and K % {_INPUTS} == 0, got {weight.dtype} {[*weight.shape]} "
            f"on {weight.device}: leave it as it is"
        )
    return arrange(weight, _GROUP[weight.dtype])


def pack_bf16(weight: Tensor) -> Tensor:
    """Packs ``weight [N, K]`` float32 as bfloat16 ``[N / 16, K / 2, 16, 2]``, viewed as int16.

    Raises:
        ValueError: bfloat16 does not represent it exactly, see `fits_bf16`.
    """
    if not fits_bf16(weight):
        raise ValueError(
            "expected a float32 weight that can be packed and that is exact in bfloat16, got "
            f"{weight.dtype} {[*weight.shape]} that is not: pack it in its dtype"
        )
    upper = weight.view(torch.int32) >> 16
    return arrange(upper.to(torch.int16), _GROUP[torch.int16])


def arrange(weight: Tensor, group: int) -> Tensor:
    """Reorders ``weight [N, K]`` of any dtype to ``[N / 16, K / group, 16, group]``."""
    outputs, inputs = weight.shape
    tiles = weight.reshape(outputs // _PANEL, _PANEL, inputs // group, group)
    return tiles.transpose(1, 2).contiguous()


def unpack(weight: Tensor) -> Tensor:
    """Restores ``[N, K]`` from a packed weight: float32 from bf16-widen."""
    panels, groups, _, group = weight.shape
    return _widen(weight.transpose(1, 2).reshape(panels * _PANEL, group * groups))


def _widen(weight: Tensor) -> Tensor:
    """bf16-widen (int16) to float32; others unchanged."""
    return weight.view(torch.bfloat16).float() if weight.dtype is torch.int16 else weight


def rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Gathers rows ``ids [...]`` of a packed weight -> ``[..., K]``: for tied embeddings."""
    return _widen(weight[ids // _PANEL, :, ids % _PANEL].flatten(-2))


def reference(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes ``input @ unpack(weight).T + bias`` in float32, rounded once.

    Args:
        input: ``[M, K]`` bfloat16 or float32, rows of any stride.
        weight: from `pack` in the same dtype, or from `pack_bf16` for float32 inputs.
        bias: ``[N]`` in the input's dtype.

    Returns:
        ``[M, N]`` in the input's dtype.
    """
    sums = functional.linear(input.float(), unpack(weight).float())
    if bias is not None:
        sums = sums + bias.float()
    return sums.to(input.dtype)


def fake(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns an empty result."""
    return input.new_empty(input.shape[0], weight.shape[0] * _PANEL)


def reference_all(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    """`reference` for each layer; ``biases``: one per layer, or none."""
    given: Sequence[Tensor | None] = biases or [None] * len(weights)
    layers = zip(weights, given, strict=True)
    return [reference(input, *layer) for layer in layers]


def fake_all(input: Tensor, weights: Sequence[Tensor], *_: Sequence[Tensor]) -> list[Tensor]:
    """Returns empty results."""
    return [fake(input, weight) for weight in weights]


def reference_swiglu(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """``silu(gate) * up`` (SwiGLU, Shazeer 2020), rounded once more.

    Raises:
        ValueError: not two layers, or different numbers of outputs.
    """
    check_swiglu("packed_swiglu", weights)
    gate, up = reference_all(input, weights, biases)
    return (functional.silu(gate.float()) * up.float()).to(input.dtype)


def fake_swiglu(input: Tensor, weights: Sequence[Tensor], *_: Sequence[Tensor]) -> Tensor:
    """Returns an empty result."""
    check_swiglu("packed_swiglu", weights)
    return fake(input, weights[0])


def check_swiglu(op: str, weights: Sequence[Tensor]) -> None:
    """Raises ValueError unless ``weights`` are two, with as many panels each."""
    outputs = [weight.shape[0] * _PANEL for weight in weights]
    if len(outputs) != 2 or outputs[0] != outputs[1]:
        raise ValueError(
            f"{op}: expected the weights of gate and up, with as many outputs each, "
            f"got {outputs}: pass [gate, up]"
        )


def fake_rows(weight: Tensor, ids: Tensor) -> Tensor:
    """Returns an empty result of `rows`."""
    return _widen(weight.new_empty(ids.shape[0], weight.shape[1] * weight.shape[3]))
