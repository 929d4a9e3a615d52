"""Layers with quantised weights, which compute by the op ``quantised_linear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compiled_attn.models.packed_layers import PackedEmbedding, PackedLayer, PackedLinear
from compiled_attn.models.packed_weight import WriteTrap
from compiled_attn.ops.choose import serves_quantised
from compiled_attn.ops.packed_linear import BITS_OF
from compiled_attn.ops.quantised_linear import (
    QuantisedWeight,
    quantise,
    reference_rows,
    round_inputs,
)

__all__ = ["QuantisedEmbedding", "QuantisedLayer", "QuantisedLinear"]

_SCALES = "scales", "steps"


class QuantisedLayer(PackedLayer):
    """A layer whose parameter is hidden, and whose numbers are a `QuantisedWeight`.

    Args:
        layer: a linear layer or embedding, for sizes and bias; its parameter is hidden by ``trap``.
        quantised: the weight.
        trap: hides the parameter.
        format: name of the format of a file, whose weights cannot be replaced; or the packing that
            rounded them, see `compiled_attn.ops.packed_linear.BITS_OF`.
        int8_inputs: whether inputs are rounded to int8 too (``w4a8``).
        order: ``[K]`` int64, which input each column of ``quantised`` multiplies; None: its own.
    """

    packed: Tensor
    scales: Tensor
    steps: Tensor
    order: Tensor | None

    def __init__(
        self,
        layer: Any,
        quantised: QuantisedWeight,
        trap: WriteTrap,
        format: str,
        int8_inputs: bool = False,
        order: Tensor | None = None,
    ) -> None:
        super().__init__(layer, quantised.codes, trap)
        self.format, self.int8_inputs = format, int8_inputs
        for name in _SCALES:
            self.register_buffer(name, getattr(quantised, name), persistent=False)
        self.register_buffer("order", order, persistent=False)

    @property
    def quantised(self) -> QuantisedWeight:
        """The weight."""
        return QuantisedWeight(self.packed, self.scales, self.steps)

    @property
    def _plain_shape(self) -> tuple[int, int]:
        return self.quantised.shape

    def _is_cast(self) -> bool:
        return False

    def plain_weight(self) -> Tensor:
        """Returns the weight in the dtype of the parameter."""
        weight = self.quantised.dequantise().to(self.weight.dtype)
        return (
            weight
            if self.order is None
            else torch.empty_like(weight).index_copy_(1, self.order, weight)
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedLayer:
        before = {name: getattr(self, name) for name in _SCALES}
        super()._apply(fn, recurse)
        for name, scales in before.items():  # a cast of the model must not round them
            now = getattr(self, name)
            if now.dtype is not scales.dtype:
                setattr(self, name, scales.to(now.device))
        return self

    def _pack_into(self, name: str, plain: Tensor, packed: Tensor, errors: list[str]) -> None:
        if self.format not in BITS_OF:
            errors.append(
                f"expected no new weight for {name}, which is {self.format} of a file, got one: "
                "load the other file"
            )
            return
        new = quantise(plain.float(), self.quantised.bits)
        if new.scales.dtype is not self.scales.dtype and new.scales.dtype is torch.float32:
            errors.append(
                f"expected for {name} weights whose scales float16 holds, like those before, got "
                "others: load the model again"
            )
            return
        packed.copy_(new.codes)
        self.scales.copy_(new.scales)


class QuantisedLinear(QuantisedLayer, PackedLinear):
    """A linear layer that calls the op ``quantised_linear``; see `QuantisedLayer`."""

    def _multiply(self, rows: Tensor) -> Tensor:
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        out: Tensor = torch.ops.compiled_attn.quantised_linear(
            rows, self.packed, self.scales, self.steps, self.bias, self.int8_inputs
        )
        return out

    def _supports(self, dtype: torch.dtype) -> bool:
        return serves_quantised(self.packed.device.type, dtype)

    def plain(self, input: Tensor) -> Tensor:
        """Computes the output like a plain layer, with the weight dequantised for this call."""
        ordered = input if self.order is None else input[..., self.order]
        rows = round_inputs(ordered) if self.int8_inputs else ordered.float()
        sums = functional.linear(rows, self.quantised.dequantise())
        return (sums if self.bias is None else sums + self.bias).to(input.dtype)


class QuantisedEmbedding(QuantisedLayer, PackedEmbedding):
    """An embedding by rows of a quantised weight; see `QuantisedLayer`."""

    def _rows(self, ids: Tensor) -> Tensor:
        flat, dtype = ids.reshape(-1).long().contiguous(), self.weight.dtype
        is_served = serves_quantised(self.packed.device.type, torch.float32)
        look_up = torch.ops.compiled_attn.quantised_rows if is_served else reference_rows
        rows = look_up(self.packed, self.scales, self.steps, flat, dtype is torch.bfloat16)
        shaped: Tensor = rows.view(*ids.shape, -1)
        return shaped if dtype is torch.bfloat16 else shaped.to(dtype)
