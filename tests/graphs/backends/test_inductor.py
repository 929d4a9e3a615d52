import gc
import weakref

import pytest
import torch
from torch import nn

from graphs import CaptureError, StaleGraph, available_backends, capture
from graphs.backends.inductor import InductorBackend
from graphs.capture.contract import CaptureSpec, Job
from graphs.torch_internals.compiling import compiling_after

pytestmark = pytest.mark.usefixtures("no_grad")


class Counter(nn.Module):
    """Counts its calls in a buffer and adds the count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.step = 1.0

    def forward(self, x):
        self.count.add_(self.step)
        return torch.relu(x) * 2 + self.count


def needs_compiler():
    if reason := available_backends()["inductor"]:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def captured():
    needs_compiler()
    module = Counter()
    with torch.no_grad():
        graphs = {
            tokens: capture(module, [torch.randn(tokens, 8)], name=f"counter[tokens={tokens}]")
            for tokens in (4, 16)
        }
    return module, graphs


def test_inductor_equals_eager_at_each_bucket(captured):
    module, graphs = captured
    for tokens, graph in graphs.items():
        x = torch.randn(tokens, 8)
        result = graph.run(x)
        torch.testing.assert_close(result, torch.relu(x) * 2 + module.count)


def test_inductor_keeps_a_buffer_up_to_date(captured):
    module, graphs = captured
    module.count.fill_(100)
    x = torch.zeros(4, 8)
    assert graphs[4].run(x).unique().tolist() == [101]
    assert module.count.item() == 101
    assert graphs[16].run(torch.zeros(16, 8)).unique().tolist() == [102]
    assert module.count.item() == 102


def test_a_changed_attribute_makes_a_compiled_graph_stale(captured, monkeypatch):
    module, graphs = captured
    count = module.count.clone()
    monkeypatch.setattr(module, "step", 2.0)
    with pytest.raises(StaleGraph, match="step"):
        graphs[4].run(torch.zeros(4, 8))
    torch.testing.assert_close(module.count, count)
    monkeypatch.undo()
    graphs[4].run(torch.zeros(4, 8))


def test_inductor_is_the_default_backend(captured):
    _, graphs = captured
    assert graphs[4].backend == "inductor"


def test_more_graphs_of_one_module_than_dynamos_limits_all_hold():
    module = Counter()
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=3):
        graphs = [
            capture(module, [torch.ones(tokens, 2)], backend="aot_eager") for tokens in range(1, 13)
        ]
        module.count.zero_()
        for round_ in range(2):
            for place, graph in enumerate(graphs):
                result = graph.run(torch.ones(place + 1, 2))
                assert result.unique().tolist() == [round_ * 12 + place + 3]


def test_the_same_callable_compiled_elsewhere_does_not_serve_a_captured_graph():
    def scale(x):
        return x * 2

    elsewhere = torch.compile(scale, backend="aot_eager", dynamic=True)
    elsewhere(torch.ones(3))
    graph = capture(scale, [torch.ones(4)], backend="aot_eager")
    assert graph.run(torch.ones(4)).tolist() == [2, 2, 2, 2]
    assert elsewhere(torch.ones(5)).tolist() == [2] * 5


def test_closing_frees_the_module():
    module = Counter()
    gone = weakref.ref(module)
    graph = capture(module, [torch.ones(2, 2)], backend="aot_eager")
    graph.close()
    del module
    gc.collect()
    assert gone() is None


def test_options_reach_the_compiler(captured):
    with pytest.raises(CaptureError, match="no_such_option"):
        capture(Counter(), [torch.ones(2, 2)], options={"no_such_option": 1})


@pytest.fixture
def without_compiler():
    inductor = pytest.importorskip("torch._inductor.cpp_builder")
    config = {"cpp.cxx": ("no-such-compiler",)}
    inductor.cpp_compiler_search.cache_clear()
    with torch._inductor.config.patch(config):
        yield
    inductor.cpp_compiler_search.cache_clear()


def test_without_a_compiler_the_reason_says_how_to_get_one(without_compiler, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # which needs no C++
    reason = available_backends()["inductor"]
    for part in ("no working C++ compiler", "apt install g++", "dnf", "xcode-select", "'eager'"):
        assert part in reason
    with pytest.raises(CaptureError, match="'inductor' is not available: no working C") as caught:
        capture(Counter(), [torch.ones(2, 2)])
    assert "\n" not in str(caught.value)
    assert capture(Counter(), [torch.ones(2, 2)], backend="eager").backend == "eager"


@pytest.mark.parametrize("compiler", ["aot_eager", "own"])
def test_compiling_after_waits_between_trace_and_compile(compiler):
    order = []

    def own(graph, inputs):
        order.append("compile")
        return graph.forward

    backend = InductorBackend("waiting", own if compiler == "own" else compiler)
    x = torch.arange(4.0)
    with compiling_after(lambda: order.append("wait")):
        spec = CaptureSpec(backend, "sine", warm_runs=2)
        frozen = backend.capture(Job(torch.sin, [x], spec))
    assert order == (["wait", "compile"] if compiler == "own" else ["wait"])
    assert torch.equal(frozen.run(x), x.sin())
    order.clear()
    backend.capture(Job(torch.cos, [x], CaptureSpec(backend, "cosine")))
    assert "wait" not in order


def test_a_graph_break_comes_with_the_hint_of_dynamo_and_its_traceback():
    def broken(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(CaptureError, match=r"test_inductor\.py:\d+: .* \(hint: .+\)$") as caught:
        capture(broken, [torch.ones(2)], backend="aot_eager")
    assert type(caught.value.__cause__).__name__ == "Unsupported"
    assert caught.value.__cause__.__traceback__ is not None
