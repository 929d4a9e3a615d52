"""Layers of one input, and SwiGLU, are fused where that is what the graph computes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.nn import functional

from compiled_attn.models.packed import pack_linears
from compiled_attn.ops import load, packed_linear
from compiled_attn.ops.fusion import FuseLinears
from compiled_attn.ops.packed_linear import Packing
from tests.slow import slow_but

OPTIONS = {"post_grad_custom_pre_pass": FuseLinears()}
FUSED = "ed_linears.default("
ALONE = "ed_linear.default("
SWIGLU = "ed_swiglu.default("


class Layers(nn.Module):
    """Two layers of one input, a third of another, and one of the same with a bias."""

    def __init__(self, *, biased: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 96, bias=False) for _ in range(2))
        self.down = nn.Linear(96, 64, bias=False)
        self.other = nn.Linear(64, 32, bias=biased)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(torch.relu(self.gate(x)) * self.up(x)), self.other(x)


def packed(module: nn.Module, packing: Packing = "packed") -> nn.Module:
    module = module.bfloat16().eval().requires_grad_(False)
    if packing == "bf16-widen":
        module = module.float()
        module.scale = nn.Parameter(torch.ones(1), False)  # one parameter stays a float
    pack_linears(module, contextlib.ExitStack(), lambda _: packing)
    return module


def compiled(module: Callable[..., Any], x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], str]:
    torch._dynamo.reset()
    run = torch.compile(module, fullgraph=True, dynamic=False, options=OPTIONS)
    with torch.no_grad():
        out, (code,) = run_and_get_code(run, x)
    return out, code


def traced(module: Callable[..., Any], x: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The result and code of the graph that inductor would compile, in a tenth of the time."""
    torch._dynamo.reset()
    codes = []

    def fuse(graph: GraphModule, _: object) -> Callable[..., Any]:
        joint_graph_passes(graph)
        FuseLinears()(graph.graph)
        graph.recompile()
        codes.append(graph.code)
        return graph.forward

    backend = aot_autograd(fw_compiler=fuse, decompositions=select_decomp_table())
    with torch.no_grad():
        out = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(x)
    (code,) = codes
    return out, code


def assert_fused(module: Callable[..., Any], x: torch.Tensor, *, alone: int) -> None:
    """One fused call and so many others, with the bits of eager."""
    out, code = compiled(module, x)
    assert code.count(FUSED) == 1 and code.count(ALONE) == alone
    with torch.no_grad():
        expected = module(x)
    assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))


@pytest.mark.parametrize(
    ("packing", "rows"),
    slow_but(
        [*zip(get_args(Packing), (1, 7, 40, 7, 1, 40), strict=True)],
        product(get_args(Packing), (1, 7, 40)),
    ),
)
def test_layers_of_one_input_are_one_call_and_the_same_bits(packing, rows):
    module = packed(Layers(), packing)
    x = torch.randn(1, rows, 64).to(torch.float32 if packing == "bf16-widen" else torch.bfloat16)
    assert_fused(module, x, alone=1)  # down


def test_a_layer_with_a_bias_is_not_fused_with_those_without():
    module = packed(Layers(biased=True))
    x = torch.randn(3, 64).bfloat16()
    assert_fused(module, x, alone=2)


def test_layers_that_are_packed_in_other_ways_are_not_fused():
    module = Layers().bfloat16().float().eval().requires_grad_(False)
    widened = module.up.weight
    pack_linears(
        module, contextlib.ExitStack(), lambda w: "bf16-widen" if w is widened else "packed"
    )
    x = torch.randn(3, 64)
    assert_fused(module, x, alone=2)


def test_a_weight_that_the_graph_computes_stays_where_it_is():
    weight = packed_linear.pack(torch.randn(32, 64).bfloat16())
    op = torch.ops.compiled_attn.packed_linear
    load()

    def forward(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = op(x, weight)
        return first, op(x, weight * (factor + first.sum()))

    x, factor = torch.randn(2, 64).bfloat16(), torch.ones((), dtype=torch.bfloat16)
    run = torch.compile(forward, fullgraph=True, dynamic=False, options=OPTIONS)
    out, (code,) = run_and_get_code(run, x, factor)
    assert FUSED not in code and code.count(ALONE) == 2
    torch.testing.assert_close(out[0], packed_linear.reference(x, weight))


@pytest.mark.parametrize("transposed", [torch.neg, lambda x: torch.softmax(x, -1)])
def test_rows_that_a_graph_computes_by_columns_are_laid_out_for_the_op(transposed):
    module = packed(Layers())

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return module(transposed(x.t()).contiguous())

    x = torch.randn(64, 3).bfloat16()
    assert_fused(forward, x, alone=1)


def test_a_weight_that_is_read_later_than_the_first_call_is_left_there():
    op, graph = torch.ops.compiled_attn.packed_linear.default, torch.fx.Graph()
    load()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    first = graph.call_function(op, (x, weight))
    second = graph.call_function(op, (x, graph.get_attr("other")))
    graph.output((first, second))
    FuseLinears()(graph)
    graph.lint()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [op, op]


class SwiGlu(nn.Module):
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


FEW = (False, True, True, True, False, True), (True, False, True, True, False, False)
SWIGLUS = [*product(SILU, get_args(Packing), (False, True), (False, True))]


# All pairs of two settings.
PAIRS = [each for at, each in enumerate(SWIGLUS) if (at // 12 + at // 4 + at // 2 + at) % 2]


@pytest.mark.parametrize(("multiply", "packing", "biased", "flat"), slow_but(PAIRS, SWIGLUS))
def test_swiglu_is_one_call(multiply, packing, biased, flat):
    assert_swiglu(traced, multiply, packing, biased, flat)


@pytest.mark.parametrize(
    ("multiply", "packing", "biased", "flat"),
    slow_but(
        [*zip(2 * [*SILU][:3], get_args(Packing), *FEW, strict=True)],
        SWIGLUS,
    ),
)
def test_inductor_computes_swiglu_as_eager_does(multiply, packing, biased, flat):
    assert_swiglu(compiled, multiply, packing, biased, flat)


def assert_swiglu(
    trace: Callable[..., Any], multiply: str, packing: Packing, biased: bool, flat: bool
) -> None:
    module = packed(SwiGlu(SILU[multiply], flat=flat, biased=biased), packing)
    x = torch.randn(1, 7, 64).to(torch.float32 if packing == "bf16-widen" else torch.bfloat16)
    out, code = trace(module, x)
    assert code.count(SWIGLU) == 1 and FUSED not in code
    assert not re.search(r"sigmoid|\bexp\b", code)
    with torch.no_grad():
        expected = module(x)
    few = {} if packing == "bf16-widen" else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(out, expected, **few)


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
def test_other_products_are_not_fused(multiply):
    assert_not_swiglu(packed(SwiGlu(multiply), "bf16-widen"), torch.randn(1, 7, 64))


@pytest.mark.parametrize("wide", [lambda g: g.float(), lambda g: g.double()])
def test_a_product_of_another_dtype_is_not_fused(wide):
    def multiply(gate, up, x):
        return (functional.silu(wide(gate(x))).float() * up(x)).bfloat16()

    module = packed(SwiGlu(multiply))
    assert_not_swiglu(module, torch.randn(1, 7, 64).bfloat16(), rtol=1e-2, atol=1e-2)


def assert_not_swiglu(module: nn.Module, x: torch.Tensor, **near: float) -> None:
    out, code = traced(module, x)
    assert SWIGLU not in code
    with torch.no_grad():
        torch.testing.assert_close(out, module(x), **near)


def test_layers_of_other_sizes_with_equal_views_are_not_fused():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = functional.silu(self.gate(x).view(7, -1, 32))
            return gate * self.up(x).view(7, -1, 32)

    assert_not_swiglu(packed(Wide(), "bf16-widen"), torch.randn(7, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_found_where_rows_are_a_symbol(dtype):
    module = packed(SwiGlu(SILU["silu"]), "bf16-widen" if dtype is torch.float32 else "packed")
    torch._dynamo.reset()
    run = torch.compile(module, fullgraph=True, dynamic=True, options=OPTIONS)
    for rows in (7, 40):
        x = torch.randn(1, rows, 64).to(dtype)
        with torch.no_grad():
            out, (code,) = run_and_get_code(run, x)
            torch.testing.assert_close(out, module(x), rtol=2**-6, atol=2**-6)
        assert code.count(SWIGLU) == 1 and FUSED not in code
