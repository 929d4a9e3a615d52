"""A small model with layers that can be packed, and the ways to pack them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from compiled_attn.ops import load, packed_linear
from compiled_attn.ops.packed_linear import BITS_OF

IDS = torch.tensor([[3, 17, 47], [0, 16, 31]])


class Small(nn.Module):
    """Layers that are packed, and one of each kind that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 64)
        self.head = nn.Linear(64, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.inner = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 32, bias=False)})
        self.odd = nn.Linear(64, 24)
        self.watched = nn.Linear(64, 32)
        self.watched.register_forward_hook(lambda *_: None)
        self.scaled = Scaled(48, 64)
        self.of_scaled = nn.Linear(64, 48, bias=False)
        self.of_scaled.weight = self.scaled.weight

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        x = self.inner["a"](self.embedding(ids)) + self.scaled(ids)
        return [self.head(x), self.inner["b"](x), self.odd(x), self.watched(x), self.of_scaled(x)]


class Scaled(nn.Embedding):
    """An embedding that does more than torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def as_bf16_widen(weight: torch.Tensor) -> packed_linear.Packing | None:
    return "bf16-widen" if packed_linear.fits_bf16(weight) else "packed"


@dataclass
class Kind:
    """A packing, and the dtype of the models that it is for."""

    dtype: torch.dtype
    packing: Callable[[torch.Tensor], packed_linear.Packing | None]

    def model(self) -> Small:
        load()
        torch.manual_seed(0)
        return Small().bfloat16().to(self.dtype).eval()

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as it comes back, in its dtype."""
        if not self.bits:
            return weight
        size, middle = 32 if self.bits < 8 else weight.shape[1], 1 << (self.bits - 1)
        groups = weight.float().unflatten(1, (-1, size))
        least, greatest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = torch.where(-least >= greatest, -least, -greatest).div(middle).half().float()
        codes = (groups / scale).round().clamp(-middle, middle - 1)
        return (codes * scale).flatten(1).to(self.dtype)

    @property
    def bits(self) -> int:
        """Bits of rounded weights; 0: exact ones."""
        each = {packed_linear.as_rounded(name): bits for name, bits in BITS_OF.items()}
        return each.get(self.packing, 0)


KINDS = {
    "packed": Kind(torch.bfloat16, packed_linear.as_packed),
    "float32": Kind(torch.float32, packed_linear.as_packed),
    "bf16-widen": Kind(torch.float32, as_bf16_widen),
    "int8": Kind(torch.bfloat16, packed_linear.as_rounded("int8")),
    "w8a16": Kind(torch.float32, packed_linear.as_rounded("w8a16")),
    "int4": Kind(torch.float32, packed_linear.as_rounded("int4")),
    "w4a16": Kind(torch.float32, packed_linear.as_rounded("w4a16")),
}


of_any_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert value.dtype is expected[name].dtype and torch.equal(value, expected[name]), name
