"""Nested inputs against torch's own pytrees, and through every backend."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree

import graphs
from graphs.capture.structure import CallStructure, FlatCall, Structure
from graphs.errors import InputMismatch
from tests.slow import slow_but

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Registered:
    weight: Tensor
    bias: Tensor


torch.export.register_dataclass(Registered)


@dataclasses.dataclass
class Unregistered:
    weight: Tensor


LEAVES = st.sampled_from([True, 3, 0.5, "text", None]) | st.integers(0, 9).map(torch.tensor)
KEYS = st.sampled_from(["a", "b", "it's", 'say "x"', 7])
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Registered, st.just(torch.ones(1)), st.just(torch.zeros(1)))
    ),
    max_leaves=8,
)


@given(TREES)
def test_leaves_are_those_of_torch(tree):
    structure = Structure(tree, "tree")
    expected, spec = _pytree.tree_flatten(tree)
    taken = structure.take(tree)
    assert taken is not None and len(taken) == len(structure.names) == len(set(structure.names))
    assert all(one is other for one, other in zip(taken, expected, strict=True))
    assert all(one is other for one, other in zip(structure.leaves, expected, strict=True))
    rebuilt, rebuilt_spec = _pytree.tree_flatten(structure.build(taken))
    assert rebuilt_spec == spec and all(map(lambda a, b: a is b, rebuilt, expected))


@given(TREES, TREES)
def test_another_structure_is_noticed(tree, other):
    taken = Structure(tree, "tree").take(other)
    same = _pytree.tree_structure(tree) == _pytree.tree_structure(other)
    if same:
        assert taken is not None
    elif taken is not None:  # dicts in another order are the same inputs
        assert sorted(map(id, taken)) == sorted(map(id, _pytree.tree_leaves(other)))


def step(x: Tensor, cache: dict[str, Any], *, scale: float = 1.0) -> Tensor:
    return (x + cache["keys"][0]) * scale + cache["values"]


def call() -> dict[str, Any]:
    cache = {"keys": [torch.ones(2)], "values": torch.ones(2)}
    return {"x": torch.ones(2), "cache": cache, "scale": 2.0}


def test_inputs_may_come_by_position_or_by_keyword_in_any_order():
    for args, kwargs in (((), call()), ((call()["x"],), {"cache": call()["cache"], "scale": 2.0})):
        structure = CallStructure(step, args, kwargs)
        assert structure.names == ["x", "cache['keys'][0]", "cache['values']", "scale"]
        given = call()
        x, cache = given["x"], given["cache"]
        leaves = (x, cache["keys"][0], cache["values"], 2.0)
        turned = {"values": cache["values"], "keys": cache["keys"]}
        for inputs, named in (
            ((), {"scale": 2.0, "cache": turned, "x": x}),
            ((x,), {"scale": 2.0, "cache": cache}),
            ((x, cache), {"scale": 2.0}),
        ):
            taken = structure.flatten(inputs, named, "step")
            assert all(a is b for a, b in zip(taken, leaves, strict=True))
        flat = FlatCall(step, structure.names, structure.build)
        assert torch.equal(flat(*leaves), step(**given))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda inputs: inputs.pop("x"), "'x' is missing"),
        (lambda inputs: inputs.update(more=1), "'more' is unknown"),
        (lambda inputs: inputs["cache"]["keys"].append(torch.ones(2)), r"'cache\['keys'\]\[1\]'"),
        (lambda inputs: inputs["cache"].pop("values"), r"'cache\['values'\]' is missing"),
        (lambda inputs: inputs.update(cache=torch.ones(2)), "'cache' is unknown"),
        (lambda inputs: inputs.update(cache=(1, 2)), r"'cache\[0\]' is unknown"),
        (lambda inputs: inputs.update(cache=Unregistered(torch.ones(2))), "register_dataclass"),
    ],
)
def test_another_call_names_what_differs(change, text):
    structure = CallStructure(step, (), call())
    inputs = call()
    change(inputs)
    with pytest.raises(InputMismatch, match=text):
        structure.flatten((), inputs, "step")


def test_an_input_is_passed_once():
    inputs = call()
    with pytest.raises(TypeError, match="input 'x' is passed twice"):
        CallStructure(step, (inputs["x"],), inputs)
    structure = CallStructure(step, (), call())
    with pytest.raises(InputMismatch, match="input 'x' is passed twice"):
        structure.flatten((inputs["x"],), inputs, "step")


def test_a_variable_number_of_inputs_has_numbers():
    def total(*parts: Tensor, factor: list[float]) -> Tensor:
        return sum(parts) * factor[0]  # type: ignore[return-value]

    args = torch.ones(2), torch.ones(2)
    structure = CallStructure(total, args, {"factor": [2.0]})
    leaves = structure.flatten(args, {"factor": [2.0]}, "total")
    assert torch.equal(
        FlatCall(total, structure.names, structure.build)(*leaves), torch.full([2], 4.0)
    )
    with pytest.raises(InputMismatch, match=r"'parts\[2\]' is unknown"):
        structure.flatten((*args, args[0]), {"factor": [2.0]}, "total")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Unregistered(torch.ones(1)), r"'cache' is a Unregistered.*register_dataclass\(Unreg"),
        ([{1, 2}], r"'cache\[0\]' is a set"),
        ({(1, 2): torch.ones(1)}, "'cache': key.*tuple; expected str or int"),
    ],
)
def test_unknown_classes_are_refused_before_anything_runs(value, text):
    def never(cache: Any) -> None:
        raise AssertionError("it ran")

    for inputs in ((value,), {"cache": value}):
        with pytest.raises(TypeError, match=text):
            graphs.capture(never, inputs, backend="eager")


class Attention(nn.Module):
    """Writes to a nested cache, and returns a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        cache: dict[str, Any],
        *,
        mask: Registered | None = None,
        scale: float = 2.0,
    ) -> dict[str, Any]:
        cache["keys"][0].add_(1)
        y = self.linear(x) * scale + cache["keys"][0]
        if mask is not None:
            y = y + mask.weight - mask.bias
        return {"y": y, "rest": (y * 2, [cache["values"] + 1, y.sum()])}


def attention_inputs(rows: int = 3) -> dict[str, Any]:
    cache = {"keys": [torch.randn(rows, 4)], "values": torch.randn(2)}
    mask = Registered(torch.randn(4), torch.randn(4))
    return {"x": torch.randn(rows, 4), "cache": cache, "mask": mask, "scale": 3.0}


# Inductor's code is aoti's too, and test_aoti has nested inputs.
@pytest.mark.parametrize(
    "backend", slow_but(("eager", "inductor", "onnxrt"), ("eager", "inductor", "aoti", "onnxrt"))
)
def test_a_graph_of_nested_inputs_equals_the_module(backend):
    if reason := graphs.available_backends()[backend]:
        pytest.skip(reason)
    module = Attention().eval().requires_grad_(False)
    with torch.no_grad():
        graph = graphs.capture(module, attention_inputs(), backend=backend)
        assert [spec.name for spec in graph.input_specs][1] == "cache['keys'][0]"
        for _ in range(2):
            inputs = attention_inputs()
            copied = copy.deepcopy(inputs)
            torch.testing.assert_close(graph.run(**inputs), module(**copied))
            torch.testing.assert_close(inputs["cache"], copied["cache"])  # written in place
        by_position = attention_inputs()
        x, cache = by_position.pop("x"), by_position.pop("cache")
        expected = module(x, copy.deepcopy(cache), **by_position)
        torch.testing.assert_close(graph.run(x, cache, **by_position), expected)
        with pytest.raises(InputMismatch, match=r"tensor 'mask\.bias' has shape"):
            graph.run(**attention_inputs() | {"mask": Registered(torch.ones(4), torch.ones(3))})
        with pytest.raises(InputMismatch, match=r"constant 'scale' is 2\.0, captured 3\.0"):
            graph.run(**attention_inputs() | {"scale": 2.0})


def test_a_graph_of_flat_inputs_takes_keywords_too():
    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    graph = graphs.capture(scaled, [torch.ones(2), torch.ones(2)], backend="eager")
    assert torch.equal(graph.run(torch.ones(2), weight=torch.full([2], 3.0)), torch.full([2], 3.0))
    with pytest.raises(InputMismatch, match="captured x, weight"):
        graph.run(torch.ones(2), wieght=torch.ones(2))


def test_buckets_share_a_symbolic_graph_of_nested_inputs():
    module = Attention().eval().requires_grad_(False)
    buckets = graphs.explicit(["rows"], [2, 4, 8])
    manager = graphs.WarmupManager(
        module, buckets, lambda bucket: attention_inputs(bucket.rows), symbolic=["rows"]
    )
    report = manager.warmup()
    assert len(report.captured) == 3 and report.graphs == 1
    with graphs.no_compile(), torch.no_grad():
        for rows in (3, 8, 1):
            bucket = manager.bucket(rows=rows)
            inputs = attention_inputs(bucket.rows)
            copied = copy.deepcopy(inputs)
            torch.testing.assert_close(manager.run(bucket, **inputs), module(**copied))
            torch.testing.assert_close(
                manager({"rows": rows}, **attention_inputs(bucket.rows))["y"].shape,
                (bucket.rows, 4),
            )
        with pytest.raises(InputMismatch, match=r"'mask\.bias' is missing"):
            manager.run(bucket, **attention_inputs() | {"mask": None})


def test_inputs_of_a_bucket_with_another_structure_fail_that_bucket():
    def inputs(bucket: graphs.Bucket) -> dict[str, Any]:
        made = attention_inputs(bucket.rows)
        return made if bucket.rows > 2 else made | {"mask": None}

    module = Attention().eval().requires_grad_(False)
    buckets = graphs.explicit(["rows"], [2, 4])
    report = graphs.WarmupManager(module, buckets, inputs, backend="eager").warmup()
    (failed,) = report.failed
    assert failed.bucket.rows == 2 and "'mask.weight' is missing" in failed.error


def test_explain_takes_keywords_and_names_what_is_inside():
    module = Attention().eval().requires_grad_(False)
    with torch.no_grad():
        report = graphs.explain(module, **attention_inputs())
    assert not report.breaks and len(report.graphs) == 1
    assert "cache['keys'][0] is float32[3, 4] on cpu" in report.guards
    assert not [guard for guard in report.guards if "FlatCall" in guard or "constant" in guard]


def test_positional_only_parameters_keep_their_place():
    def minus(one, /, two):
        return one - two

    one, two = torch.randn(3), torch.randn(3)
    structure = CallStructure(minus, (one,), {"two": two})
    assert structure.flatten((one, two), {}, "")[0] is one
    assert torch.equal(graphs.capture(minus, (one, two), backend="eager").run(one, two), one - two)


@dataclasses.dataclass
class WithDefault:
    x: Tensor
    scale: object = None


torch.export.register_dataclass(WithDefault)


def test_a_field_that_the_example_left_empty_is_not_dropped():
    structure = Structure(WithDefault(torch.randn(3)), "value")
    assert structure.take(WithDefault(torch.randn(3))) is not None
    assert structure.take(WithDefault(torch.randn(3), torch.randn(3))) is None
