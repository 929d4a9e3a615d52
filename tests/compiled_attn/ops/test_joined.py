"""Packed layers of one input are taken in one call, and give the bits that they give alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from compiled_attn.models.packed import pack_linears
from compiled_attn.ops import load, packed_linear
from compiled_attn.ops.joined import JoinedLayers
from compiled_attn.ops.packed_linear import Packing

OPTIONS = {"post_grad_custom_pre_pass": JoinedLayers()}
JOINED = "torch.ops.compiled_attn.packed_linears.default("
ALONE = "torch.ops.compiled_attn.packed_linear.default("


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
    if packing == "halves":
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


@pytest.mark.parametrize("packing", get_args(Packing))
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_layers_of_one_input_are_one_call_and_the_same_bits(rows, packing):
    module = packed(Layers(), packing)
    x = torch.randn(1, rows, 64).to(torch.float32 if packing == "halves" else torch.bfloat16)
    out, code = compiled(module, x)
    assert code.count(JOINED) == 1 and code.count(ALONE) == 1  # down
    with torch.no_grad():
        wanted = module(x)
    assert all(torch.equal(*pair) for pair in zip(out, wanted, strict=True))


def test_a_layer_with_a_bias_is_not_joined_with_those_without():
    module = packed(Layers(biased=True))
    x = torch.randn(3, 64).bfloat16()
    out, code = compiled(module, x)
    assert code.count(JOINED) == 1 and code.count(ALONE) == 2
    with torch.no_grad():
        wanted = module(x)
    assert all(torch.equal(*pair) for pair in zip(out, wanted, strict=True))


def test_layers_that_are_packed_in_other_ways_are_not_joined():
    module = Layers().bfloat16().float().eval().requires_grad_(False)
    halved = module.up.weight
    pack_linears(module, contextlib.ExitStack(), lambda w: "halves" if w is halved else "packed")
    x = torch.randn(3, 64)
    out, code = compiled(module, x)
    assert code.count(JOINED) == 1 and code.count(ALONE) == 2
    with torch.no_grad():
        wanted = module(x)
    assert all(torch.equal(*pair) for pair in zip(out, wanted, strict=True))


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
    assert JOINED not in code and code.count(ALONE) == 2
    torch.testing.assert_close(out[0], packed_linear.reference(x, weight))


@pytest.mark.parametrize("transposed", [torch.neg, lambda x: torch.softmax(x, -1)])
def test_rows_that_a_graph_computes_by_columns_are_laid_out_for_the_op(transposed):
    module = packed(Layers())

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return module(transposed(x.t()).contiguous())

    x = torch.randn(64, 3).bfloat16()
    out, code = compiled(forward, x)
    assert code.count(JOINED) == 1
    with torch.no_grad():
        wanted = forward(x)
    assert all(torch.equal(*pair) for pair in zip(out, wanted, strict=True))


def test_a_weight_that_is_read_later_than_the_first_call_is_left_there():
    op, graph = torch.ops.compiled_attn.packed_linear.default, torch.fx.Graph()
    load()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    first = graph.call_function(op, (x, weight))
    second = graph.call_function(op, (x, graph.get_attr("other")))
    graph.output((first, second))
    JoinedLayers()(graph)
    graph.lint()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [op, op]


def test_the_pass_has_an_identity_for_caches():
    assert JoinedLayers().uuid() == JoinedLayers().uuid()
