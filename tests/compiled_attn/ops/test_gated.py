"""A gate and what it is for are one call, where that is what the graph computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

from compiled_attn.ops.packed_linear import Packing
from tests.compiled_attn.ops.test_joined import JOINED, OPTIONS, compiled, packed

GATED = "torch.ops.compiled_attn.packed_gated.default("


class Gated(nn.Module):
    """A layer of SwiGLU."""

    def __init__(
        self, multiply: Callable[..., torch.Tensor], *, flat: bool = False, biased: bool = False
    ) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 96, bias=biased) for _ in range(2))
        self.down, self.multiply, self.flat = nn.Linear(96, 64), multiply, flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.multiply(self.gate, self.up, x[0] if self.flat else x))


def _up_first(gate: nn.Module, up: nn.Module, x: torch.Tensor) -> torch.Tensor:
    other = up(x)
    return other * functional.silu(gate(x))


SILU = {
    "silu": lambda gate, up, x: functional.silu(gate(x)) * up(x),
    "up first": _up_first,
    "sigmoid": lambda gate, up, x: torch.sigmoid(g := gate(x)) * g * up(x),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("packing", get_args(Packing))
@pytest.mark.parametrize("multiply", SILU)
def test_a_gate_and_what_it_is_for_are_one_call(multiply, packing, biased, flat):
    module = packed(Gated(SILU[multiply], flat=flat, biased=biased), packing)
    x = torch.randn(1, 7, 64).to(torch.float32 if packing == "halves" else torch.bfloat16)
    out, code = compiled(module, x)
    assert code.count(GATED) == 1 and JOINED not in code
    assert "sigmoid" not in code and "exp" not in code.replace("expected", "")
    with torch.no_grad():
        wanted = module(x)
    few = {} if packing == "halves" else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(out, wanted, **few)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda gate, up, x: functional.gelu(gate(x)) * up(x),
        lambda gate, up, x: functional.silu(g := gate(x)) * up(x) + g,
        lambda gate, up, x: functional.silu(gate(x)) * (u := up(x)) + u,
        lambda gate, up, x: (s := functional.silu(gate(x))) * up(x) + s,
        lambda gate, up, x: functional.silu(gate(x)) * up(x).flip(-1),
        lambda gate, up, x: functional.silu(gate(x)) * 2 + up(x),
        lambda gate, up, x: functional.silu(gate(x)) * gate(x) + up(x),
        lambda gate, up, x: gate(x) / (2 + torch.exp(-gate(x))) * up(x),
        lambda gate, up, x: (functional.silu(gate(x).double()).bfloat16() * up(x)).float(),
        lambda gate, up, x: (functional.silu(gate(x).double()) * up(x)).float(),
        lambda gate, up, x: (
            functional.silu(gate(x).view(1, 7, 8, 12)) * up(x).view(1, 7, 12, 8).mT
        ).reshape(1, 7, 96),
    ],
)
def test_what_is_no_gate_stays_as_it_is(multiply):
    module = packed(Gated(multiply), "halves")
    x = torch.randn(1, 7, 64)
    out, code = compiled(module, x)
    assert GATED not in code
    with torch.no_grad():
        torch.testing.assert_close(out, module(x))


def test_layers_of_other_sizes_that_views_make_alike_are_no_gate():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = functional.silu(self.gate(x).view(7, -1, 32))
            return gate * self.up(x).view(7, -1, 32)

    module, x = packed(Wide(), "halves"), torch.randn(7, 64)
    out, code = compiled(module, x)
    assert GATED not in code
    with torch.no_grad():
        torch.testing.assert_close(out, module(x))


@pytest.mark.parametrize(
    "gate",
    [lambda g: functional.silu(g.float()).half(), lambda g: functional.silu(g.double()).float()],
)
def test_a_product_of_another_dtype_is_no_gate(gate):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(64, 32, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return gate(self.gate(x)) * self.up(x)

    module, x = packed(Mixed()), torch.randn(7, 64).bfloat16()
    out, code = compiled(module, x)
    assert GATED not in code and out.dtype is torch.float32
    with torch.no_grad():
        torch.testing.assert_close(out, module(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_is_found_where_rows_are_a_symbol(dtype):
    module = packed(Gated(SILU["silu"]), "halves" if dtype is torch.float32 else "packed")
    torch._dynamo.reset()
    run = torch.compile(module, fullgraph=True, dynamic=True, options=OPTIONS)
    for rows in (7, 40):
        x = torch.randn(1, rows, 64).to(dtype)
        with torch.no_grad():
            out, (code,) = run_and_get_code(run, x)
            torch.testing.assert_close(out, module(x), rtol=2**-6, atol=2**-6)
        assert code.count(GATED) == 1 and JOINED not in code
