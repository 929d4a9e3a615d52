"""The contract of the hpu backend, on a stub of the bridge: nothing here ran on a device."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from graphs import CaptureError, capture, eager_between, no_compile
from graphs.backends import hpu
from graphs.backends.hpu import HpuBackend
from tests.graphs.backends.hpu_bridge import Bridge, stubbed_bridge

BACKEND = HpuBackend()


@pytest.fixture
def bridge(monkeypatch) -> Bridge:
    return stubbed_bridge(monkeypatch)


@pytest.fixture
def hpu_backend():
    """A Dynamo backend of the name that the bridge registers."""
    registry = torch._dynamo.backends.registry
    compiled = []

    def hpu_backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    registry.register_backend(hpu_backend, name="hpu_backend")
    yield compiled
    for table in (registry._BACKENDS, registry._COMPILER_FNS):
        table.pop("hpu_backend", None)


def test_lazy_mode_wraps_once_and_marks_a_step_around_each_run(bridge):
    graph = capture(nn.ReLU(), [torch.ones(2)], backend=BACKEND, warm_runs=2)
    assert bridge.log == ["wrap", "mark", "record", "mark", "mark", "replay", "mark"]
    with no_compile() as sentinel:
        assert graph.run(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
    assert sentinel.replays == 1
    assert bridge.log[-3:] == ["mark", "replay", "mark"]


def test_a_function_is_wrapped_as_a_module(bridge):
    graph = capture(lambda x, n: x * n, [torch.ones(2), 3], backend=BACKEND)
    assert graph.run(torch.ones(2), 3).tolist() == [3, 3]


def test_marked_functions_are_refused(bridge):
    marked = eager_between(lambda x: x + 1)
    with pytest.raises(CaptureError, match=r"'<lambda>' is marked .* an HPU graph is one rec"):
        capture(lambda x: marked(x) * 2, [torch.ones(2)], backend=BACKEND)


def test_each_bucket_is_a_graph_of_its_own(bridge):
    graphs = [capture(lambda x: x + 1, [torch.ones(n)], backend=BACKEND) for n in (4, 2)]
    assert [graph.run(torch.ones(n)).tolist() for graph, n in zip(graphs, (4, 2), strict=True)] == [
        [2] * 4,
        [2] * 2,
    ]
    assert bridge.log.count("record") == 2


def test_eager_mode_compiles_with_hpu_backend_and_wraps_nothing(bridge, hpu_backend):
    bridge.is_lazy = False
    graph = capture(lambda x: torch.relu(x) + 1, [torch.ones(2)], backend=BACKEND)
    assert graph.run(torch.tensor([-1.0, 2.0])).tolist() == [1, 3]
    assert len(hpu_backend) == 1 and bridge.log == []


class Cached(nn.Module):
    def __init__(self, cache):
        super().__init__()
        self.register_buffer("cache", cache)

    def forward(self, x):
        self.cache[0] = x
        return self.cache.sum()


def test_a_cache_of_its_own_is_updated_and_a_view_is_refused(bridge):
    own = Cached(torch.zeros(2, 2))
    graph = capture(own, [torch.ones(2)], backend=BACKEND)
    assert graph.run(torch.full((2,), 3.0)) == 6 and own.cache.sum() == 6
    with pytest.raises(CaptureError, match="cache is a view and is written in place"):
        capture(Cached(torch.zeros(2, 2, 2)[0]), [torch.ones(2)], backend=BACKEND)
    with pytest.raises(CaptureError, match="x is a view"):
        capture(lambda x: x.add_(1), [torch.zeros(2, 2)[0]], backend=BACKEND)


def test_a_failing_callable_is_a_capture_error(bridge):
    with pytest.raises(CaptureError, match="boom"):
        capture(_fails, [torch.ones(2)], backend=BACKEND)


def _fails(x):
    raise ValueError("boom")


def test_the_reason_is_given_where_there_is_no_bridge_or_no_device(bridge, monkeypatch):
    assert BACKEND.available() is None
    bridge.has_device = False
    assert BACKEND.available() == "habana_frameworks sees no HPU device"
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", None)
    assert "does not import" in BACKEND.available()
    monkeypatch.setattr(hpu, "find_spec", lambda name: None)
    assert "is not installed" in BACKEND.available()
    with pytest.raises(CaptureError, match="Intel Gaudi software"):
        capture(torch.relu, [torch.ones(2)], backend=BACKEND)


@pytest.mark.hpu
def test_on_a_device_a_graph_equals_eager():
    layer = nn.Linear(8, 8).to("hpu")
    x = torch.randn(4, 8, device="hpu")
    with torch.no_grad():
        graph = capture(layer, [x], backend=BACKEND)
        torch.testing.assert_close(graph.run(x * 2), layer(x * 2))
