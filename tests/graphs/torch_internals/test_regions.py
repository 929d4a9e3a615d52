"""Regions: calls with one key are traced once, and compute what they do without regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from graphs import WarmupManager, capture, explicit
from graphs.torch_internals.regions import REGION_REUSE, REGIONS, Region

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_gradients")

LAYERS = 3


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor | None


@dataclass(frozen=True)
class Step:
    pairs: dict[int | None, Pair]
    scale: float


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x, step):
        pair = step.pairs[None]
        x = self.two(self.one(x) + pair.one).relu() * step.scale + self.shift
        return self.norm(x if pair.other is None else x - pair.other)


class Stack(nn.Module):
    """Gives each layer a tensor of its own, and all of them another one."""

    def __init__(self, keys=(0,) * LAYERS, packs=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in keys)
        self.own = nn.ParameterList(torch.randn(8) for _ in keys)
        self.keys, self.packs = keys, packs
        self.region = Region(lambda layer, x, step: layer(x, step), (Pair, Step))

    def forward(self, x, other):
        x = x + 1  # computed, as what each layer is given
        shared = self.region.pack(Pair(other, other)) if self.packs else None
        for number, layer in enumerate(self.layers):
            pair = shared or Pair(self.own[number], other)
            x = self.region(self.keys[number], layer, x, step=Step({None: pair}, 0.5))
        return x


@pytest.fixture
def traces(monkeypatch):
    """How often Dynamo has traced a region."""
    if not REGION_REUSE.is_on:
        pytest.skip(REGION_REUSE.why_off)
    invoke_subgraph = pytest.importorskip("torch._dynamo.variables.invoke_subgraph")
    region = invoke_subgraph.InvokeSubgraphHigherOrderVariable
    own, made = region.create_wrapped_node, []

    def counting(self, *args, **kwargs):
        made.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(region, "create_wrapped_node", counting)
    return made


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 8), torch.randn(8)


def check(function, *given):
    """Captures a callable and compares two runs of the graph with it."""
    graph = capture(function, given, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(graph.run(*given), function(*given))
        given = tuple(each.clone().mul_(2) for each in given)


@pytest.mark.parametrize("packs", [False, True])
def test_calls_with_one_key_are_traced_once(packs, traces):
    check(Stack(packs=packs), *inputs())
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("keys", "count"), [((0, 1, 0), 2), ((0, 1, 2), 3), ((None, None, None), 3)]
)
def test_calls_with_other_keys_are_traced_by_themselves(keys, count, traces):
    check(Stack(keys), *inputs())
    assert len(traces) == count


def test_without_regions_no_trace_is_reused(traces, monkeypatch):
    monkeypatch.setattr(REGIONS, "_why_off", "switched off by a test")
    check(Stack(), *inputs())
    assert not traces


def test_parameters_that_layers_share():
    stack = Stack()
    for layer in stack.layers[1:]:
        layer.one.weight = stack.layers[0].one.weight
    check(stack, *inputs())


def test_arguments_of_another_structure_are_traced(traces):
    stack = Stack()

    def function(x, other):
        for pairs in (
            {None: Pair(other, None)},
            {None: Pair(other, other)},
            {1: Pair(x, x), None: Pair(x, x)},
        ):
            x = stack.region(0, stack.layers[0], x, Step(pairs, 0.5))
        return stack.region(0, stack.layers[1], x, step=Step({None: Pair(other, other)}, 0.25))

    check(function, *inputs())
    assert len(traces) == 4


CONSTANTS = [
    *(True, 1, 1.0, 2, "1", None, (1,), [1], {"a": 1}, {"b": 1}),
    *("a b", "a-b", "a_b", "a_sb", "a:b", {"a:str-b": 1, "c": 1}, {"a": 1, "b:str-c": 1}),
]


@pytest.mark.parametrize("values", [CONSTANTS, CONSTANTS[::-1]], ids=["in order", "reversed"])
def test_constants_that_differ_are_traced_again(values):
    def see(_, x, value):
        code = sum([place * ord(sign) for place, sign in enumerate(repr(value))])
        return x * (code + 10 * isinstance(value, bool))

    region, module = Region(see), nn.Identity()

    def function(x):
        return torch.stack([region(0, module, x, value) for value in values])

    check(function, torch.ones(3))


@pytest.mark.parametrize("names", ["aa ab", "ab aa", "ab ba", "ab bc", "ab cd", "aa bb"])
def test_tensors_of_several_arguments(names):
    """One and the same in one call and two in another, or in each other's places."""
    calls = [[*map("abcd".index, name)] for name in names.split()]
    region, module = Region(lambda _, pair: pair.one * 2 - pair.other, (Pair,)), nn.Identity()

    def function(*tensors):
        results = [region(0, module, Pair(tensors[one], tensors[two])) for one, two in calls]
        return results[0] + 10 * results[1]

    check(function, *torch.arange(12.0).view(4, 3).unbind())


@pytest.mark.parametrize("other", [torch.ones(8).double(), torch.ones(3, 8), torch.ones(8, 3).t()])
def test_tensors_of_another_layout(other):
    region = Region(lambda layer, x, y: layer(x).add(y).float())
    layer = nn.Linear(8, 8)
    check(
        lambda x, y, z: region(0, layer, x, y) * region(0, layer, x, z),
        *(torch.ones(3, 8), torch.ones(8), other),
    )


@pytest.mark.parametrize(("one", "two"), [((1, 8), (3, 8)), ((3, 8), (1, 8)), ((3, 1), (3, 8))])
def test_tensors_of_another_shape(one, two):
    region, module = Region(lambda _, x, y: x + y * y.shape[0]), nn.Identity()
    check(
        lambda x, y, z: region(0, module, x, y) * region(0, module, x, z),
        *(torch.ones(3, 8), torch.ones(one), torch.ones(two)),
    )


def test_an_argument_of_another_kind_is_traced_each_time(traces):
    class Opaque:
        def __init__(self, scale):
            self.scale = scale

    region, module = Region(lambda _, x, opaque: x * opaque.scale), nn.Identity()
    check(
        lambda x: region(0, module, x, Opaque(2)) + region(0, module, x, Opaque(3)), torch.ones(3)
    )
    assert len(traces) == 2


def test_several_results(traces):
    region = Region(lambda layer, x: (layer(x), x + 1))
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def function(x):
        y = x
        for layer in layers:
            x, y = region(0, layer, x + y)
        return x, y

    check(function, torch.ones(3, 8))
    assert len(traces) == 1


class Variants(nn.Module):
    """Layers whose results are not tensors alone, with a variant that has no regions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.region = Region(lambda layer, x: (layer(x), None))

    def forward(self, x):
        for layer in self.layers:
            x, _ = self.region(0, layer, x)
        return x

    def plain(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def capture_variants(self):
        return self, self.plain


def test_results_that_are_not_tensors_are_captured_without_regions(caplog):
    has_reuse = REGION_REUSE.is_on
    check(Variants(), torch.ones(3, 8))
    said = [each for each in caplog.messages if "captured in a simpler way" in each]
    assert len(said) == has_reuse


class Doubling(nn.ReLU):
    def forward(self, x):
        return 2 * super().forward(x)


def test_calls_without_a_key_are_traced_again():
    """Torch since 2.12 by itself computes the second layer as the first."""
    layers = [nn.Sequential(nn.ReLU()), nn.Sequential(Doubling())]
    region = Region(lambda layer, x: layer(x))
    check(lambda x: region(None, layers[0], x) + 10 * region(None, layers[1], x), torch.ones(3))


def test_sizes_that_are_symbols_serve_all_layers(traces):
    """That one of them is another plus one is known before the region, as torch needs it."""
    stack = Stack()
    region = Region(lambda layer, x, starts, step: layer(x, step) + starts[1:, None], (Pair, Step))

    def function(x, starts, other):
        x = x + starts[1:, None]
        for number, layer in enumerate(stack.layers):
            x = region(0, layer, x, starts, Step({None: Pair(stack.own[number], other)}, 0.5))
        return x

    def of_bucket(bucket):
        n = bucket.tokens
        return [torch.ones(n, 8), torch.arange(n + 1.0), torch.ones(8)]

    space = explicit(("tokens",), [(2,), (5,), (7,)])
    manager: Any = WarmupManager(
        function, space, of_bucket, backend="aot_eager", symbolic=("tokens",)
    )
    report = manager.warmup()
    assert (len(report.captured), report.compiles, len(traces)) == (3, 1, 1)
    for bucket in space:
        given = of_bucket(bucket)
        torch.testing.assert_close(manager.run(bucket, *given), function(*given))
