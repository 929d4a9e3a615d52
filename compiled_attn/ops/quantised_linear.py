"""The op ``quantised_linear``: a linear layer whose weight stays in 4, 5, 6 or 8 bits.

A weight ``[N, K]`` is ``scale * code - minimum``, with a scale and a minimum for each output and
group of inputs. Codes are unsigned; where a format has no minimum, the middle of their range is 0.
Panels are 16 outputs, blocks 32 inputs; see ``csrc/linear/quantised_codes.h`` for the order of the
bits. A group's sum of products with codes is scaled once, in float32, in either mode:

- exact inputs (``w4a16``, ``w8a16``): inputs are multiplied as they are. Tiles of AMX multiply
  bfloat16 inputs by weights that are rounded to bfloat16 instead of codes.
- int8 inputs (``w4a8``, ``w8a8``): inputs are first rounded to int8, with a scale for each row and
  block. Sums of a group are exact integers, so tiles and registers give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compiled_attn.ops.packed_linear import can_round, check_swiglu

__all__ = [
    "BITS", "QuantisedWeight", "fake", "fake_all", "fake_rows", "fake_swiglu",
    "quantise", "reference", "reference_all", "reference_rows", "reference_swiglu", "round_inputs",
]  # fmt: skip

BITS = (4, 5, 6, 8)
"""Supported widths of codes."""

_PANEL, _BLOCK = 16, 32
_BYTES = 64  # of a block, for each bit
_QUAD = [0, 2, 1, 3]  # order of the inputs of a quad
_ROWS_AT_ONCE = 1024  # bounds temporary memory
_HALF = torch.finfo(torch.float16)


@dataclass(frozen=True)
class QuantisedWeight:
    """A packed weight, as the ops take it.

    Attributes:
        codes: ``[N / 16, K / 32, 64 * bits]`` uint8.
        scales: scales ``[N / 16, G, 16]``, or scales and minima ``[N / 16, G, 2, 16]``, float16 or
            float32; groups are of 16 inputs, or of whole blocks.
        steps: factors of smaller groups: int8 ``[N / 16, S, 16]`` of the scale, uint8 ``[N / 16, S,
            2, 16]`` of scale and minimum; or zero points, uint8 ``[N / 16, S, 16]``, where the
            minimum is scale times zero point; empty: none.
    """

    codes: Tensor
    scales: Tensor
    steps: Tensor

    @classmethod
    def pack(
        cls, codes: Tensor, bits: int, scales: Tensor, steps: Tensor | None = None
    ) -> QuantisedWeight:
        """Packs ``codes [N, K]``, of any integer dtype, with scales and steps per output.

        Args:
            codes: each in 0 .. 2**bits - 1.
            bits: one of `BITS`.
            scales: ``[N, G]``, or ``[N, G, 2]`` of scales and minima, float16 or float32.
            steps: ``[N, S]``, or ``[N, S, 2]``, see the class.

        Raises:
            ValueError: the sizes cannot be packed.
        """
        outputs, inputs = codes.shape
        if outputs % _PANEL or inputs % _BLOCK or bits not in BITS:
            raise ValueError(
                f"expected codes [N, K] with N % {_PANEL} == 0 and K % {_BLOCK} == 0 of {BITS} "
                f"bits, got {[*codes.shape]} of {bits}: keep such a weight in 16 bits"
            )
        for what, of in (("scales", scales), ("steps", steps)):
            if of is not None and not _divides(of.shape[1], inputs):
                raise ValueError(
                    f"expected {what} of groups of 16, 32, 64 ... inputs that divide {inputs}, got "
                    f"{of.shape[1]} groups: keep such a weight in 16 bits"
                )
        parts = [_pack_codes(part, bits) for part in codes.split(_ROWS_AT_ONCE)]
        empty = codes.new_empty(0, dtype=torch.uint8)
        return cls(
            torch.cat(parts), _by_panel(scales), empty if steps is None else _by_panel(steps)
        )

    @classmethod
    def join(cls, parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
        """Joins weights of the same inputs and kind, whose outputs follow one another."""
        joined = (torch.cat(each) for each in zip(*map(_parts, parts), strict=True))
        return cls(*joined)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.codes.shape[-1] // _BYTES

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0] * _PANEL, self.codes.shape[1] * _BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.codes.nbytes + self.scales.nbytes + self.steps.nbytes

    def dequantise(self) -> Tensor:
        """Returns the weight ``[N, K]`` in float32."""
        return _dequantise(self.codes, self.scales, self.steps)


def _parts(weight: QuantisedWeight) -> tuple[Tensor, Tensor, Tensor]:
    return weight.codes, weight.scales, weight.steps


def quantise(weight: Tensor, bits: int) -> QuantisedWeight:
    """Rounds ``weight [N, K]`` to the nearest code, with a scale per output and 32 inputs.

    With 8 bits there is one scale per output: scales of groups are a sixteenth of what is read. The
    number of largest magnitude of a group becomes the lowest code, as in Q4_0.

    Raises:
        ValueError: a weight is not finite, or cannot be packed, see
            `compiled_attn.ops.packed_linear.can_round`.
    """
    if not can_round(weight) or not weight.isfinite().all():
        raise ValueError(
            f"expected a weight of finite numbers with N % {_PANEL} == 0 and K % {_BLOCK} == 0, "
            f"got {weight.dtype} {[*weight.shape]}: keep it in its dtype"
        )
    middle = 1 << (bits - 1)
    scales, codes = [], []
    for part in weight.split(_ROWS_AT_ONCE):
        groups = part.float().unflatten(1, (-1, weight.shape[1] if bits == 8 else _BLOCK))
        least, greatest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = torch.where(-least >= greatest, -least, -greatest) / middle
        stored = scale.half().float()
        if (stored.abs() < _HALF.tiny).logical_and(scale != 0).any() or not stored.isfinite().all():
            stored = scale
        scales.append(stored.squeeze(2))
        quotient = groups / torch.where(stored == 0, 1, stored)
        codes.append((quotient.round() + middle).clamp(0, 2 * middle - 1).byte().flatten(1))
    both = torch.cat(scales)
    fits = torch.equal(both.half().float(), both)
    return QuantisedWeight.pack(torch.cat(codes), bits, both.half() if fits else both)


def round_inputs(input: Tensor) -> Tensor:
    """Rounds ``input [..., K]`` as ``w4a8`` does: to int8 times a scale per row and block; float32.

    A block with a number that is not finite becomes NaN.
    """
    blocks = input.float().unflatten(-1, (-1, _BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    rounded = (blocks / torch.where(scale == 0, 1, scale)).round() * scale
    return torch.where(scale.isfinite(), rounded, torch.nan).flatten(-2)


def reference(
    input: Tensor,
    codes: Tensor,
    scales: Tensor,
    steps: Tensor,
    bias: Tensor | None = None,
    int8_inputs: bool = False,
) -> Tensor:
    """Computes ``input @ weight.T + bias`` in float32, rounded once.

    Args:
        input: ``[M, K]`` bfloat16 or float32, rows of any stride.
        codes, scales, steps: see `QuantisedWeight`.
        bias: ``[N]`` in the input's dtype.
        int8_inputs: ``w4a8``: rounds the input first, see `round_inputs`.

    Returns:
        ``[M, N]`` in the input's dtype. With native kernels, a row with an input that is not finite
        has no finite output.
    """
    rows = round_inputs(input) if int8_inputs else input.float()
    sums = functional.linear(rows, _dequantise(codes, scales, steps))
    return (sums if bias is None else sums + bias.float()).to(input.dtype)


def fake(input: Tensor, codes: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns an empty result."""
    return input.new_empty(input.shape[0], codes.shape[0] * _PANEL)


def reference_all(
    input: Tensor,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    biases: Sequence[Tensor],
    int8_inputs: bool,
) -> list[Tensor]:
    """`reference` for each layer; ``biases``: one per layer, or none."""
    none: Sequence[Tensor | None] = [None] * len(codes)
    layers = zip(codes, scales, steps, biases or none, strict=True)
    return [reference(input, *layer, int8_inputs) for layer in layers]


def fake_all(input: Tensor, codes: Sequence[Tensor], *_: Any) -> list[Tensor]:
    """Returns empty results."""
    return [fake(input, each) for each in codes]


def reference_swiglu(input: Tensor, codes: Sequence[Tensor], *others: Any) -> Tensor:
    """``silu(gate) * up``, rounded once more.

    Raises:
        ValueError: not two layers, or different numbers of outputs.
    """
    check_swiglu("quantised_swiglu", codes)
    gate, up = reference_all(input, codes, *others)
    return (functional.silu(gate.float()) * up.float()).to(input.dtype)


def fake_swiglu(input: Tensor, codes: Sequence[Tensor], *_: Any) -> Tensor:
    """Returns an empty result."""
    check_swiglu("quantised_swiglu", codes)
    return fake(input, codes[0])


def reference_rows(
    codes: Tensor, scales: Tensor, steps: Tensor, ids: Tensor, as_bfloat16: bool
) -> Tensor:
    """Looks up rows ``ids [n]`` of a weight -> ``[n, K]`` float32 or bfloat16: for embeddings."""
    panels = ids // _PANEL
    chosen = steps[panels] if steps.numel() else steps
    whole = _dequantise(codes[panels], scales[panels], chosen)
    rows = whole.view(len(ids), _PANEL, -1)[torch.arange(len(ids), device=ids.device), ids % _PANEL]
    return rows.bfloat16() if as_bfloat16 else rows


def fake_rows(codes: Tensor, scales: Tensor, steps: Tensor, ids: Tensor, as_bfloat16: bool) -> Any:
    """Returns an empty result."""
    dtype = torch.bfloat16 if as_bfloat16 else torch.float32
    return codes.new_empty(ids.shape[0], codes.shape[1] * _BLOCK, dtype=dtype)


def _divides(groups: int, inputs: int) -> bool:
    return groups > 0 and (groups * _PANEL == inputs or inputs // _BLOCK % groups == 0)


def _by_panel(values: Tensor) -> Tensor:
    """``[N, G]`` or ``[N, G, 2]`` to ``[N / 16, G, 16]`` or ``[N / 16, G, 2, 16]``."""
    panels = values.reshape(-1, _PANEL, *values.shape[1:])
    return panels.movedim(1, -1).contiguous()


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    quads = codes.byte().contiguous().view(torch.int32)  # four bytes at a time are faster
    quads = quads.view(-1, _PANEL, codes.shape[1] // _BLOCK, 8).permute(0, 2, 3, 1).contiguous()
    quads = quads & -0xFFFF01 | (quads & 0xFF00) << 8 | quads >> 8 & 0xFF00  # see `_QUAD`
    planes = [quads]
    if bits < 8:
        low, more = quads & 0x0F0F0F0F, quads >> 4 & 0x0F0F0F0F
        planes = [low[:, :, :4] | low[:, :, 4:] << 4]
        if bits == 5:
            planes.append(_or_of([more[:, :, q] << q for q in range(8)])[:, :, None])
        elif bits == 6:
            halves = [[more[:, :, 4 * h + q] << 2 * q for q in range(4)] for h in range(2)]
            planes.append(torch.stack([*map(_or_of, halves)], 2))
    return torch.cat(planes, 2).view(torch.uint8).flatten(2)


def _or_of(parts: Sequence[Tensor]) -> Tensor:
    first, *others = parts
    for other in others:
        first = first | other
    return first


def _unpack_codes(codes: Tensor) -> Tensor:
    """Codes ``[N, K]`` as uint8."""
    panels, blocks, size = codes.shape
    bits, planes = size // _BYTES, codes.view(panels, blocks, -1, _BYTES)
    if bits < 8:
        low = torch.cat((planes[:, :, :4] & 15, planes[:, :, :4] >> 4), 2)
        if bits == 5:
            more = [planes[:, :, 4] >> q & 1 for q in range(8)]
        else:
            more = [planes[:, :, 4 + q // 4] >> 2 * (q % 4) & 3 for q in range(8) if bits == 6]
        planes = low | torch.stack(more, 2) << 4 if more else low
    quads = planes.view(panels, blocks, 8, _PANEL, 4)[..., _QUAD]  # its own inverse
    return quads.permute(0, 3, 1, 2, 4).reshape(panels * _PANEL, blocks * _BLOCK)


def _rows_of(values: Tensor) -> Tensor:
    """Inverse of `_by_panel`, in float32."""
    return values.movedim(-1, 1).flatten(0, 1).float()


def _dequantise(codes: Tensor, scales: Tensor, steps: Tensor) -> Tensor:
    plain = _unpack_codes(codes)
    middle = 1 << (codes.shape[-1] // _BYTES - 1)
    scale = _rows_of(scales)
    if steps.numel():
        small, is_zero = _rows_of(steps), scales.dim() == 3 and steps.dtype is torch.uint8
        scale = scale.repeat_interleave(small.shape[1] // scale.shape[1], 1)
        scale = torch.stack((scale, scale * small), 2) if is_zero else scale * small
    scale, minimum = scale.unbind(2) if scale.dim() == 3 else (scale, scale * middle)
    groups = plain.view(*scale.shape, -1).float()
    return (groups * scale[:, :, None] - minimum[:, :, None]).flatten(1)
