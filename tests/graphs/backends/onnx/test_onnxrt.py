from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

from graphs import CaptureError, StaleGraph, capture
from graphs.backends.onnx import onnxrt
from graphs.backends.onnx import session as onnx_session
from graphs.backends.onnx.onnxrt import OnnxrtBackend, compiled_attn_ort
from graphs.installation import install_command
from tests.slow import slow_but

PROJECT = Path(__file__).parents[4] / "pyproject.toml"
BACKEND = OnnxrtBackend()


@pytest.fixture(autouse=True)
def prepared():
    if reason := BACKEND.available():
        pytest.skip(reason)
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def sessions(monkeypatch):
    """The sessions that captures make."""
    made = []

    class Recorded(onnx_session.OnnxSession):
        def __init__(self, graph):
            super().__init__(graph)
            self.graph = graph
            made.append(self)

    monkeypatch.setattr(onnxrt, "OnnxSession", Recorded)
    return made


def tensors():
    """cache, weight, where, new rows."""
    gen = torch.Generator().manual_seed(0)
    cache = torch.arange(40.0).view(10, 4)
    return cache, torch.randn(4, 4, generator=gen), torch.tensor([1, 3, 5]), torch.ones(3, 4)


def write_then_read(cache, weight, where, new):
    cache.index_put_((where,), new)
    return cache[where[:2]] @ weight


def read_feeds_write(cache, weight, where, new):
    cache.index_put_((where,), cache[where] * 2 + new)
    return cache[where[:2]] @ weight


def read_and_write(cache, weight, where, new):
    old = cache * 2
    cache.index_put_((where,), new)
    return old, cache[where[:2]] @ weight


def returns_the_new_cache(cache, weight, where, new):
    cache.index_put_((where,), new)
    return cache.clone(), cache, weight, None, cache[where] + 1


def assert_equals_eager(function, graph):
    given, expected = tensors(), tensors()
    torch.testing.assert_close(graph.run(*given), function(*expected))
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize(
    "function",
    [pytest.param(write_then_read, marks=pytest.mark.slow), read_feeds_write],
)
def test_a_cache_without_other_readers_is_updated_in_place(function, sessions):
    graph = capture(function, tensors(), backend=BACKEND)
    assert sessions[0].in_place and not sessions[0].copied_back
    assert_equals_eager(function, graph)
    assert_equals_eager(function, graph)


def test_a_cache_with_another_reader_is_copied_back(sessions):
    graph = capture(read_and_write, tensors(), backend=BACKEND)
    assert sessions[0].copied_back and not sessions[0].in_place
    assert_equals_eager(read_and_write, graph)


@pytest.mark.slow
def test_without_the_check_of_its_readers_an_old_cache_is_read_after_the_write(monkeypatch):
    monkeypatch.setattr(onnx_session, "may_alias", lambda *_: True)
    graph = capture(read_and_write, tensors(), backend=BACKEND)
    old, _ = graph.run(*tensors())
    expected, _ = read_and_write(*tensors())
    where = tensors()[2]
    assert not torch.allclose(old, expected)
    torch.testing.assert_close(old[where], torch.full((3, 4), 2.0))  # twice the new rows


def test_what_is_returned_is_apart_from_the_cache():
    graph = capture(returns_the_new_cache, tensors(), backend=BACKEND)
    assert_equals_eager(returns_the_new_cache, graph)
    given = tensors()
    copy, cache, weight, nothing, _ = graph.run(*given)
    assert cache.data_ptr() == given[0].data_ptr() and weight.data_ptr() == given[1].data_ptr()
    assert copy.data_ptr() != cache.data_ptr() and nothing is None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(10, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.scale = 1.0

    def forward(self, where, x):
        self.cache[where] = self.linear(x)
        self.count += 1
        return torch.softmax(self.cache[where] * self.scale, -1)


def test_weights_and_caches_are_inputs_and_no_part_of_the_model(sessions):
    layer, where, x = Layer(), torch.tensor([2, 7]), torch.randn(2, 4)
    graph = capture(layer, [where, x], backend=BACKEND)
    sizes = [len(each.raw_data) for each in sessions[0].graph.model.graph.initializer]
    assert max(sizes, default=0) < 4 * 4 * 4
    layer.linear.weight.mul_(3)
    layer.cache.zero_()
    got, cache, count = graph.run(where, x), layer.cache.clone(), layer.count.item()
    torch.testing.assert_close(got, layer(where, x))
    torch.testing.assert_close(cache, layer.cache)
    assert count == 2


def test_a_changed_attribute_makes_the_graph_stale():
    layer, where, x = Layer(), torch.tensor([2, 7]), torch.randn(2, 4)
    graph = capture(layer, [where, x], backend=BACKEND)
    layer.scale = 2.0
    before = layer.cache.clone()
    with pytest.raises(StaleGraph, match="scale"):
        graph.run(where, x * 2)
    torch.testing.assert_close(layer.cache, before)


def test_a_cache_with_gaps_is_written_through():
    wide = torch.zeros(10, 8)
    _, *others = tensors()
    graph = capture(write_then_read, [wide[:, :4], *others], backend=BACKEND)
    wide.zero_()
    graph.run(wide[:, :4], *others)
    assert wide[others[1], :4].eq(1).all() and wide.sum() == 12


def test_an_empty_input_is_no_special_case():
    def concatenated(x, y):
        return torch.cat((x, y)) + 1

    given = torch.zeros(0, 3), torch.ones(2, 3)
    graph = capture(concatenated, given, backend=BACKEND)
    assert torch.equal(graph.run(*given), torch.full((2, 3), 2.0))


def test_a_failed_assertion_is_an_error_and_never_silent():
    def guarded(x, where):
        torch._assert_async((where < 4).all(), "where below 4")
        return x * where

    graph = capture(guarded, [torch.ones(2), torch.tensor([0, 3])], backend=BACKEND)
    with pytest.raises(RuntimeError, match="where below 4"):
        graph.run(torch.ones(2), torch.tensor([0, 5]))
    assert graph.run(torch.ones(2), torch.tensor([0, 2])).tolist() == [0, 2]


def test_bfloat16_products_are_refused_with_the_reason():
    given = [x.bfloat16() if x.is_floating_point() else x for x in tensors()]
    with pytest.raises(CaptureError, match=r"ONNX Runtime refuses it: .*MatMul"):
        capture(write_then_read, given, backend=BACKEND)


def test_an_operator_without_an_onnx_form_is_refused_by_name():
    def spectrum(x):
        return torch.linalg.svdvals(x)

    with pytest.raises(CaptureError, match="svd"):
        capture(spectrum, [torch.eye(3)], backend=BACKEND)


def test_gradients_are_refused():
    with torch.enable_grad(), pytest.raises(CaptureError, match="no gradients"):
        capture(nn.Linear(2, 2), [torch.ones(1, 2)], backend=BACKEND)


def test_symbolic_sizes_are_refused():
    compiled = torch.compile(lambda x: x * 2, backend=compiled_attn_ort, dynamic=True)
    with pytest.raises(Exception, match="dynamic=False"):
        compiled(torch.ones(3))


def test_the_entry_point_names_the_dynamo_backend():
    project = tomllib.loads(PROJECT.read_text())["project"]
    group = project.get("entry-points", {}).get("torch_dynamo_backends", {})
    if not group:
        pytest.fail("pyproject.toml has no entry point group torch_dynamo_backends")
    value = group["compiled_attn_ort"]
    backend = EntryPoint("compiled_attn_ort", value, "torch_dynamo_backends").load()
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend=backend, dynamic=False)
    assert compiled(torch.tensor([-1.0, 2.0])).tolist() == [1, 3]


def test_a_missing_package_is_the_reason(monkeypatch):
    monkeypatch.setattr(onnxrt, "find_spec", lambda name: None if name == "onnx" else object())
    assert BACKEND.available() == f"onnx not installed; {install_command('ort')}"


@pytest.mark.parametrize("dtype", slow_but((torch.int32,), (torch.int32, torch.int64)))
def test_indices_of_any_width_are_taken(dtype):
    def taken(cache, where):
        cache[where] = cache[where] + 1
        return cache[where]

    given = torch.zeros(4, 2), torch.tensor([1, 3], dtype=dtype)
    graph = capture(taken, given, backend=BACKEND)
    given[0].zero_()
    assert graph.run(*given).eq(1).all() and given[0].sum() == 4
