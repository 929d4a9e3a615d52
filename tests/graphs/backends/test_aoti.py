from __future__ import annotations

import json
from zipfile import ZipFile

import pytest
import torch
from torch import nn
from torch._inductor import config

from graphs import CaptureError, CompileWatch, StaleGraph, capture
from graphs.backends.aoti import AotiBackend
from graphs.capture.export_state import Returned, State, Stateless, constants_of_others

pytestmark = pytest.mark.usefixtures("no_grad")

BACKEND = AotiBackend()


class Layer(nn.Module):
    """Writes a cache and a counter, and returns much."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.tied = self.linear
        self.register_buffer("cache", torch.zeros(10, size), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, where, x, factor):
        self.cache[where] = self.tied(x)
        self.count += 1
        literal = torch.tensor([1.0, 2.0]).sum()
        return {"y": self.cache[where] * factor + literal, "none": None}, (self.cache, 7, x)


def inputs(seed: int = 0, size: int = 64):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([2, 5]), torch.randn(2, size, generator=generator), 3


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if reason := BACKEND.available():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("package")
    # Precompiled headers take three times as long to make as this package without.
    with torch.no_grad(), config.patch({"aot_inductor.precompile_headers": False}):
        layer = Layer()
        return folder, layer, capture(layer, inputs(), backend=BACKEND, package_path=folder)


@pytest.fixture
def loaded(built):
    """A layer of its own and the graph loaded for it."""
    folder, layer, _ = built
    own = Layer()
    own.load_state_dict(layer.state_dict())
    own.count.zero_()
    return own, BACKEND.load(own, folder, name="layer")


def test_it_equals_eager_with_what_it_writes(built):
    _, layer, graph = built
    eager = Layer()
    eager.load_state_dict(layer.state_dict())
    eager.cache.copy_(layer.cache)
    (got, (cache, seven, x)), (expected, _) = graph.run(*inputs(3)), eager(*inputs(3))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(layer.cache, eager.cache)
    assert torch.equal(layer.count, eager.count)
    assert cache is layer.cache and seven == 7 and torch.equal(x, inputs(3)[1])


def test_a_loaded_package_uses_the_tensors_of_its_caller_and_compiles_nothing(built):
    folder, _, _ = built
    with CompileWatch() as watch:
        other = Layer()
        frozen = BACKEND.load(other, folder, name="layer")
        got, _ = frozen.run(*inputs(4))
    assert not watch.events
    assert other.count == 1
    torch.testing.assert_close(other.cache[inputs()[0]], other.linear(inputs(4)[1]))
    torch.testing.assert_close(got["y"], other.linear(inputs(4)[1]) * 3 + 3)


def test_what_the_caller_changes_counts_at_the_next_run(loaded):
    layer, graph = loaded
    layer.linear.weight.zero_()
    layer.linear.bias = nn.Parameter(torch.full((64,), 2.0))
    layer.cache = torch.zeros(10, 64)
    got, _ = graph.run(*inputs())
    assert got["y"].unique().tolist() == [9]
    assert layer.cache.sum() == 2 * 64 * 2


def test_a_state_of_another_dtype_is_stale_and_nothing_runs(built):
    folder, layer, graph = built
    layer.double()
    before = layer.cache.clone()
    try:
        with pytest.raises(StaleGraph, match="'cache' has dtype float64, captured float32"):
            graph.run(*inputs())
        assert torch.equal(layer.cache, before)
        with pytest.raises(CaptureError, match=r"was built with .*float32"):
            BACKEND.load(layer, folder, name="layer")
    finally:
        layer.float()
    graph.run(*inputs())


def test_the_package_holds_no_weights(built):
    folder, layer, _ = built
    layout = json.loads((folder / "graph.json").read_text())
    names = [name for name, *_ in layout["state"]]
    assert names == ["cache", "count", "linear.weight", "linear.bias"]
    weight = layer.linear.weight.detach().numpy().tobytes()
    with ZipFile(folder / "graph.pt2") as package:
        files = [package.read(name) for name in package.namelist()]
    assert files and not any(weight[:256] in content for content in files)


def test_a_missing_package_is_an_error_that_says_so(tmp_path):
    with pytest.raises(CaptureError, match=r"there is no .*graph\.pt2: capture it again"):
        BACKEND.load(Layer(), tmp_path, name="layer")


def test_closing_a_graph_without_a_folder_of_its_own_leaves_no_file(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fails(*args, **kwargs):
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    monkeypatch.setattr(AotiBackend, "available", lambda self: None)
    with pytest.raises(CaptureError, match="no compiler today"):
        capture(torch.relu, [torch.ones(2)], backend=BACKEND)
    assert not [*tmp_path.iterdir()]


OUTSIDE = torch.ones(3)


def of_global(x):
    return x + OUTSIDE


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = torch.ones(3)

    def forward(self, x):
        return x + self.bag


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return x + self.count


def in_closure():
    mine = torch.ones(3)
    return lambda x: x + mine


def over_module():
    linear = nn.Linear(3, 3)
    return lambda x: linear(x)


@pytest.mark.parametrize(
    ("function", "name"),
    [(of_global, "OUTSIDE"), (Hidden(), "bag"), (in_closure(), "mine"), (over_module(), "linear")],
)
def test_a_tensor_that_would_be_frozen_into_the_package_is_refused(function, name, monkeypatch):
    monkeypatch.setattr(AotiBackend, "available", lambda self: None)
    with pytest.raises(CaptureError, match=f"constants of the package .*{name}.*buffers"):
        capture(function, [torch.ones(3)], backend=BACKEND)


def test_a_module_that_replaces_a_buffer_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(AotiBackend, "available", lambda self: None)
    with pytest.raises(CaptureError, match=r"replaces count, .*self\.count\.copy_"):
        capture(Replaces(), [torch.ones(3)], backend=BACKEND)


def test_numbers_written_in_the_code_are_no_constants_of_others():
    def plus_literal(x):
        return x + torch.tensor([1.0, 2.0, 3.0])

    program = torch.export.export(Stateless(plus_literal, [OUTSIDE]), (OUTSIDE,), strict=False)
    assert program.constants and constants_of_others(program, plus_literal) == ""


def test_state_has_each_shared_tensor_once():
    state = State(Layer())
    assert [spec.name for spec in state.specs] == ["cache", "count", "linear.weight", "linear.bias"]
    assert State(torch.relu).now() == []


def test_a_stateless_call_tells_what_was_given_made_or_constant():
    call = Stateless(lambda x, n: (x, x + n, None), [OUTSIDE, 2])
    (made,) = call(OUTSIDE)
    assert torch.equal(made, OUTSIDE + 2)
    assert isinstance(call.returned, Returned) and call.returned.leaves == [
        ["input", 0],
        ["made", 0],
        ["constant", None],
    ]


def test_gradients_are_refused():
    with torch.enable_grad(), pytest.raises(CaptureError, match=r"under torch\.no_grad"):
        capture(nn.Linear(2, 2), [torch.ones(1, 2)], backend=BACKEND)


def test_inputs_that_are_one_tensor_are_refused():
    """Export makes one input of them, so that the other would never be read."""
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="are one tensor: give each a tensor of its own"):
        capture(lambda a, b: a - b, [x, x], backend=BACKEND)
