"""Linear layers with weights of 4 to 8 bits on CUDA devices: checks shapes, picks a tile, launches.

Arguments and results are those of `compiled_attn.ops.quantised_linear`; float16 is served too.
Weights are rounded to the dtype of the input where they are widened, sums are float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from compiled_attn.errors import KernelArgumentError
from compiled_attn.ops.packed_linear import check_swiglu
from compiled_attn.ops.triton.arguments import MAX_AMD_WARPS, Launch
from compiled_attn.ops.triton.linear import linear_kernel, rows_kernel

__all__ = [
    "Tile", "kind_of", "linear_launch", "quantised_linear", "quantised_linears",
    "quantised_rows", "quantised_swiglu", "rows_launch", "tile_of",
]  # fmt: skip

_PANEL, _BLOCK, _BYTES = 16, 32, 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCKS_OF_ROW = 16


class Tile(NamedTuple):
    """Panels of outputs, blocks of inputs at once, and rows of a program; its warps and stages.

    ``in_slices``: blocks are summed at the end, so that each warp multiplies some of its own.
    """

    panels: int
    blocks: int
    rows: int
    warps: int
    stages: int
    in_slices: bool


# The first whose rows hold those of a bucket, else the last.
_TILES = (
    Tile(1, 16, 8, 4, 4, in_slices=True),
    Tile(1, 16, 16, 4, 3, in_slices=True),
    Tile(2, 8, 32, 4, 3, in_slices=True),
    Tile(4, 4, 64, 4, 3, in_slices=False),
    Tile(8, 2, 128, 8, 3, in_slices=False),
)
_FLOAT32_TILES = (Tile(1, 8, 16, 4, 2, in_slices=True), Tile(4, 2, 32, 4, 2, in_slices=False))


def tile_of(rows: int, inputs: int, dtype: torch.dtype) -> Tile:
    """Returns the tile of a bucket with some rows, for layers with some inputs."""
    tiles = _FLOAT32_TILES if dtype == torch.float32 else _TILES
    tile = next((each for each in tiles if each.rows >= rows), tiles[-1])
    blocks = 1 << (max(inputs // _BLOCK, 1) - 1).bit_length()
    return tile._replace(blocks=min(tile.blocks, blocks))


def kind_of(scales: Tensor, steps: Tensor) -> str:
    """What groups have besides codes, see `compiled_attn.ops.quantised_linear.QuantisedWeight`:
    "none", a "minimum", a "zero" point, a "factor" of the scale, "both" factors."""
    if not steps.numel():
        return "minimum" if scales.dim() == 4 else "none"
    if scales.dim() == 4:
        return "both"
    return "factor" if steps.dtype is torch.int8 else "zero"


def quantised_linear(
    input: Tensor,
    codes: Tensor,
    scales: Tensor,
    steps: Tensor,
    bias: Tensor | None = None,
    int8_inputs: bool = False,
) -> Tensor:
    """See `compiled_attn.ops.quantised_linear.reference`."""
    _check(codes, scales, steps)
    inputs = codes.shape[1] * _BLOCK
    if input.dtype not in _DTYPES or input.dim() != 2 or input.shape[1] != inputs:
        raise KernelArgumentError(
            f"quantised_linear: expected input [any, {inputs}] of float32, bfloat16 or float16, "
            f"got {input.dtype} {[*input.shape]}: pass rows of the layer's inputs"
        )
    outputs = codes.shape[0] * _PANEL
    if bias is not None and (bias.dtype != input.dtype or bias.shape != (outputs,)):
        raise KernelArgumentError(
            f"quantised_linear: expected bias [{outputs}] of {input.dtype}, got {bias.dtype} "
            f"{[*bias.shape]}: convert it with .to()"
        )
    out = input.new_empty(input.shape[0], outputs)
    if out.numel():
        rows = input if input.stride(1) == 1 else input.contiguous()
        given = rows, codes, scales, steps, bias
        tile = tile_of(len(rows), inputs, rows.dtype)
        is_interpreted = not isinstance(linear_kernel, triton.JITFunction)
        widen = is_interpreted and input.dtype == torch.bfloat16
        _run(linear_kernel, linear_launch(given, out, tile, int8_inputs, widen=widen), out)
    return out


def quantised_linears(
    input: Tensor,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    biases: Sequence[Tensor],
    int8_inputs: bool,
) -> list[Tensor]:
    """See `compiled_attn.ops.quantised_linear.reference_all`."""
    none: Sequence[Tensor | None] = [None] * len(codes)
    layers = zip(codes, scales, steps, biases or none, strict=True)
    return [quantised_linear(input, *layer, int8_inputs) for layer in layers]


def quantised_swiglu(input: Tensor, codes: Sequence[Tensor], *others: Any) -> Tensor:
    """See `compiled_attn.ops.quantised_linear.reference_swiglu`."""
    check_swiglu("quantised_swiglu", codes)
    gate, up = quantised_linears(input, codes, *others)
    return (functional.silu(gate.float()) * up.float()).to(input.dtype)


def quantised_rows(
    codes: Tensor, scales: Tensor, steps: Tensor, ids: Tensor, as_bfloat16: bool
) -> Tensor:
    """See `compiled_attn.ops.quantised_linear.reference_rows`; ids out of range give NaN."""
    _check(codes, scales, steps)
    dtype = torch.bfloat16 if as_bfloat16 else torch.float32
    out = codes.new_empty(len(ids), codes.shape[1] * _BLOCK, dtype=dtype)
    if out.numel():
        _run(rows_kernel, rows_launch(codes, scales, steps, ids.contiguous(), out), out)
    return out


def linear_launch(
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    out: Tensor,
    tile: Tile,
    int8_inputs: bool,
    *,
    widen: bool = False,
) -> Launch:
    """Returns the launch of `linear.linear_kernel`.

    Args:
        given: input, codes, scales, steps, and bias or None.
        out: the result.
        tile: see `tile_of`.
        int8_inputs: rounds inputs first.
        widen: multiply bfloat16 in float32 (interpreter).
    """
    input, codes, scales, steps, bias = given
    panels, rows = len(codes), len(input)
    arguments = {
        "input": input, **_weight(codes, scales, steps), "bias": bias, "out": out,
        "rows": rows, "panels": panels, "input_row": input.stride(0), "INT8_INPUTS": int8_inputs,
        "PANELS": tile.panels, "AT_ONCE": tile.blocks, "ROWS": tile.rows,
        "IN_SLICES": tile.in_slices, "WIDEN": widen,
    }  # fmt: skip
    warps = min(tile.warps, MAX_AMD_WARPS) if torch.version.hip else tile.warps
    grid = -(-panels // tile.panels), -(-rows // tile.rows)
    return Launch(grid, arguments, {"num_warps": warps, "num_stages": tile.stages})


def rows_launch(codes: Tensor, scales: Tensor, steps: Tensor, ids: Tensor, out: Tensor) -> Launch:
    """Returns the launch of `linear.rows_kernel`."""
    arguments = {
        **_weight(codes, scales, steps), "ids": ids, "out": out, "panels": len(codes),
        "AT_ONCE": _BLOCKS_OF_ROW,
    }  # fmt: skip
    grid = len(ids), -(-codes.shape[1] // _BLOCKS_OF_ROW)
    return Launch(grid, arguments, {"num_warps": 4})


def _weight(codes: Tensor, scales: Tensor, steps: Tensor) -> dict[str, Any]:
    """Arguments that describe a weight; codes as words, which devices load and shift as a whole."""
    blocks = codes.shape[1]
    return {
        "codes": codes.view(torch.int32), "scales": scales, "steps": steps,
        "BITS": codes.shape[2] // _BYTES, "KIND": kind_of(scales, steps), "BLOCKS": blocks,
        "SCALE_BLOCKS": blocks // scales.shape[1],
        "STEP_BLOCKS": blocks // steps.shape[1] if steps.numel() else 0,
    }  # fmt: skip


def _check(codes: Tensor, scales: Tensor, steps: Tensor) -> None:
    """Raises KernelArgumentError unless the parts of a weight fit each other."""
    parts = (codes, scales, *([steps] if steps.numel() else []))
    is_weight = (
        codes.dim() == 3
        and codes.dtype is torch.uint8
        and codes.shape[2] in (4 * _BYTES, 5 * _BYTES, 6 * _BYTES, 8 * _BYTES)
        and scales.dtype in (torch.float16, torch.float32)
        and all(each.is_contiguous() and len(each) == len(codes) for each in parts)
        and all(_has_groups(each, codes.shape[1]) for each in parts[1:])
        and all(_are_steps(each, scales) for each in parts[2:])
    )
    if not is_weight:
        got = ", ".join(f"{each.dtype} {[*each.shape]}" for each in parts)
        raise KernelArgumentError(
            "quantised_linear: expected codes [N / 16, K / 32, 64 * bits], scales and steps of a "
            f"QuantisedWeight, got {got}: pack the weight with QuantisedWeight.pack"
        )


def _has_groups(values: Tensor, blocks: int) -> bool:
    groups = values.shape[1]
    is_shape = values.shape[2:] in ((_PANEL,), (2, _PANEL))
    return is_shape and groups > 0 and (groups == 2 * blocks or blocks % groups == 0)


def _are_steps(steps: Tensor, scales: Tensor) -> bool:
    dtypes = (torch.uint8,) if scales.dim() == 4 else (torch.uint8, torch.int8)
    return steps.dim() == scales.dim() and steps.dtype in dtypes


def _run(kernel: Any, launch: Launch, on: Tensor) -> None:
    with torch.cuda.device(on.device) if on.is_cuda else contextlib.nullcontext():
        kernel[launch.grid](**launch.arguments, **launch.options)
