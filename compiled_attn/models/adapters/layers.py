"""Linear layers that add the change of each row's own LoRA adapter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiled_attn.models.packed_layers import PackedLinear

__all__ = ["AdaptedLinear", "features_of"]


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer that can be adapted; None: it is none."""
    if isinstance(module, (nn.Linear, PackedLinear)):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of GPT-2
        return module.nx, module.nf  # type: ignore[return-value]
    return None


class AdaptedLinear(nn.Module):
    """A linear layer, with the matrices of all adapters for it.

    Args:
        base: the layer.
        slots: adapters at most, the null slot 0 included.
        max_rank: largest rank of an adapter.
        slot_of_row: int32, the slot of each row of a step; shared by all layers.
        dtype: of the layer's inputs.
    """

    a: Tensor
    b: Tensor
    scale: Tensor
    ranks: Tensor
    slot_of_row: Tensor

    def __init__(
        self, base: nn.Module, slots: int, max_rank: int, slot_of_row: Tensor, dtype: torch.dtype
    ) -> None:
        super().__init__()
        sizes = features_of(base)
        assert sizes is not None
        self.base = base
        self.in_features, self.out_features = sizes
        for name, value in {
            "a": torch.zeros(slots, max_rank, self.in_features, dtype=dtype),
            "b": torch.zeros(slots, max_rank, self.out_features, dtype=dtype),
            "scale": torch.zeros(slots),
            "ranks": torch.zeros(slots, dtype=torch.int32),
            "slot_of_row": slot_of_row,
        }.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The weight of the layer, which some models look at."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer."""
        bias: Tensor | None = self.base.bias  # type: ignore[assignment]
        return bias

    def forward(self, input: Tensor) -> Tensor:
        """Computes the layer's output with the changes."""
        out = self.base(input)
        result: Tensor = torch.ops.compiled_attn.add_lora(
            out.reshape(-1, self.out_features).contiguous(),
            input.reshape(-1, self.in_features).contiguous(),
            self.a,
            self.b,
            self.scale,
            self.ranks,
            self.slot_of_row,
        )
        return result.view(out.shape)
