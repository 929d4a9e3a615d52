"""Regions: one trace for all layers that are alike, and no other result than without it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from graphs import StaleGraph, WarmupManager, capture, explicit

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
    def __init__(self, number):
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.factor = 1.0
        self.act = nn.ReLU()
        self.names = {"first": "one", "second": "two"}
        self.register_buffer("shift", torch.full((8,), float(number)))

    def forward(self, x, step):
        pair = step.pairs[None]
        x = getattr(self, self.names["first"])(x) * self.factor + pair.one
        x = self.act(getattr(self, self.names["second"])(x)) * step.scale + self.shift
        return self.norm(x if pair.other is None else x - pair.other)


@torch.compiler.nested_compile_region
def call(layer, x, *, step):
    return layer(x, step)


class Stack(nn.Module):
    """Gives each layer a tensor of its own, and all the same other one."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(number) for number in range(layers))
        self.own = nn.ParameterList(torch.randn(8) for _ in range(layers))

    def forward(self, x, other):
        x = x + 1  # computed, as what each layer is given
        for number, layer in enumerate(self.layers):
            x = call(layer, x, step=Step({None: Pair(self.own[number], other)}, 0.5))
        return x


@pytest.fixture
def traces(monkeypatch):
    """How often Dynamo has traced a region."""
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


def checked(function, *given):
    """The graph of a callable that computes what the callable does."""
    expected = function(*given)
    graph = capture(function, given, backend="aot_eager")
    torch.testing.assert_close(graph.run(*given), expected)
    return graph


def test_layers_that_are_alike_are_traced_once(traces):
    checked(Stack(), *inputs())
    assert len(traces) == 1


def tie(layer):
    layer.two.weight = layer.one.weight


def hook(layer):
    layer.one.register_forward_hook(lambda module, args, output: output + 1)


class Doubling(nn.ReLU):
    def forward(self, x):
        return 2 * super().forward(x)


OTHER = {
    "a constant": lambda layer: setattr(layer, "factor", 3.0),
    "a constant below": lambda layer: setattr(layer.norm, "eps", 1.0),
    "a constant in a dictionary": lambda layer: layer.names.update(first="two"),
    "a module of another class": lambda layer: setattr(layer, "act", Doubling()),
    "a parameter that is gone": lambda layer: setattr(layer.one, "bias", None),
    "a parameter of another layout": lambda layer: setattr(
        layer.two, "weight", nn.Parameter(layer.two.weight.t().contiguous().t())
    ),
    "one parameter in two places": tie,
    "a hook": hook,
    "a forward of its own": lambda layer: setattr(layer, "forward", lambda x, step: x + 1),
}


@pytest.mark.parametrize("number", range(LAYERS))
@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_a_layer_that_differs_is_computed_as_it_is(change, number):
    stack = Stack()
    change(stack.layers[number])
    checked(stack, *inputs())


# Dynamo by itself has no guards that see what was not there at the capture.
SEEN = {name: change for name, change in OTHER.items() if change not in (tie, hook)}


@pytest.mark.parametrize("number", range(LAYERS))
@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_a_layer_that_changes_afterwards_is_seen(change, number):
    """Each of them, though only the first was traced."""
    stack, given = Stack(), inputs()
    graph = checked(stack, *given)
    change(stack.layers[number])
    with pytest.raises(StaleGraph):
        graph.run(*given)


@pytest.mark.parametrize("number", range(LAYERS))
def test_parameters_that_are_one_in_all_layers_but_one(number):
    stack = Stack()
    for other, layer in enumerate(stack.layers):
        if other != number:
            tie(layer)
    checked(stack, *inputs())


def test_a_parameter_that_all_layers_share():
    stack = Stack()
    for layer in stack.layers:
        layer.one.weight = stack.layers[0].one.weight
    checked(stack, *inputs())


def test_arguments_of_another_shape_or_structure_are_traced(traces):
    x, other = inputs()

    def function(x, other):
        for pairs in (
            {None: Pair(other, None)},
            {None: Pair(other, other)},
            {1: 1, None: Pair(x, x)},
        ):
            x = call(stack.layers[0], x, step=Step(pairs, 0.5))
        return call(stack.layers[1], x, step=Step({None: Pair(other, other)}, 0.25))

    stack = Stack()
    checked(function, x, other)
    assert len(traces) == 4


def test_more_kinds_of_layers_than_traces_are_kept():
    stack = Stack(20)
    for number, layer in enumerate(stack.layers):
        layer.factor = 1.0 + number
    checked(stack, *inputs())


def test_what_no_tensor_is_made_of_is_traced_each_time(traces):
    class Opaque:
        def __init__(self, scale):
            self.scale = scale

    @torch.compiler.nested_compile_region
    def scaled(x, opaque):
        return x * opaque.scale

    def function(x):
        return scaled(x, Opaque(2)) + scaled(x, Opaque(3))

    checked(function, torch.ones(3))
    assert len(traces) == 2


def test_functions_of_one_code_are_told_apart():
    """Torch 2.13 by itself computes the second as the first."""

    def times(factor):
        @torch.compiler.nested_compile_region
        def region(x):
            return x * factor

        return region

    twice, thrice = times(2), times(3)
    checked(lambda x: twice(x) + thrice(x), torch.ones(3))


def test_modules_are_told_apart():
    """Their parameters are no arguments of the call."""
    regions = [torch.compiler.nested_compile_region(layer.one) for layer in Stack().layers]
    checked(lambda x: regions[0](x) + regions[1](x), torch.ones(3, 8))


@torch.compiler.nested_compile_region
def difference(pair):
    return pair.one * 2 - pair.other


@pytest.mark.parametrize("names", ["aa ab", "ab aa", "ab ba", "ab bc", "ab cd", "aa bb"])
def test_tensors_of_several_arguments(names):
    """One and the same in one call and two in another, or in each other's places."""
    calls = [[*map("abcd".index, name)] for name in names.split()]

    def function(*tensors):
        results = [difference(Pair(tensors[one], tensors[two])) for one, two in calls]
        return results[0] + 10 * results[1]

    checked(function, *torch.arange(12.0).view(4, 3).unbind())


def test_a_tuple_from_outside_may_know_more_than_its_items():
    class Known(tuple):
        pass

    @torch.compiler.nested_compile_region
    def region(x, known):
        return x * known[0] * known.factor

    ones = [Known([1]), Known([1])]
    ones[0].factor, ones[1].factor = 3, 4
    checked(lambda x: region(x, ones[0]) + 10 * region(x, ones[1]), torch.ones(3))


def test_what_was_read_of_a_layer_before_the_call():
    stack = Stack()
    stack.layers[1].names["first"] = "two"

    def function(x, other):
        if stack.layers[0].names["first"] == "one":
            x = x + 1
        return stack(x, other)

    checked(function, *inputs())


@pytest.mark.parametrize("second", [True, 1.0])
def test_constants_that_are_equal_but_not_the_same(second):
    @torch.compiler.nested_compile_region
    def region(x, constant):
        return x + 100 if isinstance(constant, bool) else x + 10 * isinstance(constant, float)

    checked(lambda x: region(x, 1) + 1000 * region(x, second), torch.ones(3))


def test_sizes_that_are_symbols_serve_all_layers(traces):
    """One of them is another plus one, which Dynamo learns in the region."""
    stack = Stack()

    @torch.compiler.nested_compile_region
    def rows(layer, x, starts, step):
        if len(starts) != len(x) + 1:
            raise ValueError
        return layer(x, step) + starts[1:, None] - len(starts)

    def function(x, starts, other):
        x = x + 1
        for number, layer in enumerate(stack.layers):
            x = rows(layer, x, starts, Step({None: Pair(stack.own[number], other)}, 0.5))
        return x

    def of_bucket(bucket):
        n = bucket.tokens
        return [torch.ones(n, 8), torch.arange(n + 1.0), torch.ones(8)]

    space = explicit(("tokens",), [(2,), (5,), (7,)])
    manager = WarmupManager(function, space, of_bucket, backend="aot_eager", symbolic=("tokens",))
    report = manager.warmup()
    assert (len(report.captured), report.compiles, len(traces)) == (3, 1, 1)
    for bucket in space:
        given = of_bucket(bucket)
        torch.testing.assert_close(manager.run(bucket, *given), function(*given))


def test_captures_at_once_do_not_see_each_other():
    stacks = [Stack() for _ in range(3)]
    for number, stack in enumerate(stacks):
        stack.layers[number].factor = 2.0
    failed = []

    def run(stack):
        try:
            with torch.no_grad():
                checked(stack, *inputs())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(stack,)) for stack in stacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
