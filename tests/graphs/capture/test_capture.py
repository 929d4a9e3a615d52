import pytest
import torch
from torch import nn

from graphs import (
    CaptureError,
    InputMismatch,
    ModeMismatch,
    StaleGraph,
    available_backends,
    capture,
)
from graphs.capture.contract import Backend, Frozen

pytestmark = pytest.mark.usefixtures("no_grad")

TRACED = ["eager", "aot_eager"]
SCALE = 3


class Cache(nn.Module):
    """Writes its input into a slot of a buffer and returns a projection."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(8, 4))
        self.factor = 2

    def forward(self, x, slot_mapping, bias=None, width=1):
        self.cache[slot_mapping] = x
        y = self.linear(x) * self.factor * SCALE * width
        return y if bias is None else y + bias


def example_inputs(tokens=3):
    return [torch.randn(tokens, 4), torch.arange(tokens)]


@pytest.mark.parametrize("backend", TRACED)
def test_a_captured_graph_computes_what_the_callable_does(backend):
    module = Cache()
    graph = capture(module, example_inputs(), backend=backend)
    for _ in range(3):
        inputs = example_inputs()
        torch.testing.assert_close(graph.run(*inputs), module.forward(*inputs))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.ones(3, 4), r"got a Tensor: a single input is written \(x,\)"),
        ("x", "got a str"),
    ],
)
def test_examples_that_are_no_tuple_list_or_dict_are_refused_before_anything_runs(wrong, text):
    ran = []
    with pytest.raises(TypeError, match="example_inputs: expected a tuple, list or dict.*" + text):
        capture(lambda *inputs: ran.append(inputs), wrong, backend="eager")
    assert ran == []


@pytest.mark.parametrize("option", [{"symbolic": ["rows"]}, {"strict": False}])
def test_options_of_a_manager_are_refused(option):
    with pytest.raises(TypeError, match=f"unknown option '{next(iter(option))}'; it is of a Warm"):
        capture(torch.relu, [torch.ones(2)], backend="eager", **option)


@pytest.mark.parametrize("backend", TRACED)
def test_what_the_graph_writes_in_place_is_seen_outside(backend):
    module = Cache()
    graph = capture(module, example_inputs(), backend=backend)
    x, slots = torch.randn(3, 4), torch.tensor([7, 1, 4])
    graph.run(x, slots)
    torch.testing.assert_close(module.cache[slots], x)
    module.linear.weight.zero_()
    module.linear.bias.fill_(1)
    assert graph.run(x, slots).unique().tolist() == [6.0]


@pytest.mark.parametrize("backend", TRACED)
def test_the_graph_knows_its_name_cost_inputs_and_mode(backend):
    graph = capture(Cache(), [*example_inputs(), None, 2], backend=backend, name="decode")
    assert (graph.name, graph.backend) == ("decode", backend)
    assert graph.seconds > 0 and graph.bytes >= 0
    assert graph.static_inputs == ()
    assert [spec.name for spec in graph.input_specs] == ["x", "slot_mapping", "bias", "width"]
    assert graph.settings.grad_enabled is False
    assert "decode" in repr(graph)


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("backend", TRACED)
def test_the_callable_really_runs_warm_runs_times(backend, runs):
    count = torch.zeros(1)
    capture(lambda x: count.add_(x), [torch.ones(1)], backend=backend, warm_runs=runs)
    assert count.item() == runs
    with pytest.raises(ValueError, match="warm_runs is 0"):
        capture(lambda x: count.add_(x), [torch.ones(1)], backend=backend, warm_runs=0)
    assert count.item() == runs


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            lambda x, s: (x, s.int()),
            "decode[tokens=3]: tensor 'slot_mapping' has dtype int32, captured int64",
        ),
        (lambda x, s: (x[:2], s), "decode[tokens=3]: tensor 'x' has shape (2, 4), captured (3, 4)"),
        (lambda x, s: (x.t().contiguous().t(), s), "tensor 'x' has stride (1, 3), captured (4, 1)"),
        (lambda x, s: (x.to("meta"), s), "tensor 'x' has device meta, captured cpu"),
        (lambda x, s: (x,), "1 inputs, captured 2 (x, slot_mapping)"),
    ],
)
def test_inputs_of_another_kind_are_refused_before_the_graph_runs(backend, inputs, text):
    module = Cache()
    graph = capture(module, example_inputs(), backend=backend, name="decode[tokens=3]")
    cache = module.cache.clone()
    with pytest.raises(InputMismatch) as caught:
        graph.run(*inputs(*example_inputs()))
    assert text in str(caught.value)
    torch.testing.assert_close(module.cache, cache)
    graph.run(*example_inputs())


@pytest.mark.parametrize("backend", TRACED)
def test_constants_and_missing_inputs_are_part_of_the_capture(backend):
    graph = capture(Cache(), [*example_inputs(), None, 2], backend=backend)
    with pytest.raises(InputMismatch, match="constant 'width' is 3, captured 2"):
        graph.run(*example_inputs(), None, 3)
    with pytest.raises(InputMismatch, match="constant 'bias' is a tensor, captured None"):
        graph.run(*example_inputs(), torch.zeros(4), 2)


@pytest.mark.parametrize("backend", TRACED)
def test_another_mode_is_refused_with_the_factor(backend):
    graph = capture(Cache(), example_inputs(), backend=backend, name="decode")
    with (
        torch.enable_grad(),
        pytest.raises(ModeMismatch, match="decode: grad_enabled is True, captured False; restore"),
    ):
        graph.run(*example_inputs())
    with torch.inference_mode(), pytest.raises(ModeMismatch, match="inference_mode is True"):
        graph.run(*example_inputs())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(ModeMismatch, match=f"threads is {threads + 1}, captured {threads}"):
            graph.run(*example_inputs())
    finally:
        torch.set_num_threads(threads)
    graph.run(*example_inputs())


def test_a_changed_global_makes_the_graph_stale_until_it_is_changed_back(monkeypatch):
    module = Cache()
    graph = capture(module, example_inputs(), backend="aot_eager", name="decode")
    cache = module.cache.clone()
    monkeypatch.setitem(globals(), "SCALE", 4)
    with pytest.raises(StaleGraph, match=r"decode: no longer holds, capture it again: .*SCALE"):
        graph.run(*example_inputs())
    torch.testing.assert_close(module.cache, cache)
    monkeypatch.undo()
    inputs = example_inputs()
    torch.testing.assert_close(graph.run(*inputs), module.forward(*inputs))


def test_a_changed_attribute_makes_the_graph_stale():
    module = Cache()
    graph = capture(module, example_inputs(), backend="aot_eager")
    module.factor = 5
    with pytest.raises(StaleGraph, match="factor"):
        graph.run(*example_inputs())


def test_a_guard_on_an_input_beyond_its_layout_names_the_input():
    graph = capture(Cache(), example_inputs(), backend="aot_eager")
    x, slots = example_inputs()
    with pytest.raises(StaleGraph, match=r"\bx\b.*requires_grad"):
        graph.run(x.requires_grad_(), slots)


@pytest.mark.parametrize("backend", TRACED)
def test_a_closed_graph_refuses_to_run(backend):
    graph = capture(Cache(), example_inputs(), backend=backend, name="decode")
    graph.close()
    graph.close()
    with pytest.raises(CaptureError, match="decode: is closed; capture it again"):
        graph.run(*example_inputs())
    assert "closed" in repr(graph)


def test_errors_of_the_callable_pass_through_a_captured_graph():
    graph = capture(lambda x, i: x[i], [torch.ones(4), torch.tensor([1])], backend="aot_eager")
    with pytest.raises(IndexError):
        graph.run(torch.ones(4), torch.tensor([9]))


@pytest.mark.parametrize("backend", TRACED)
def test_a_callable_that_fails_on_its_examples_is_a_capture_error(backend):
    with pytest.raises(CaptureError, match=r"bad: .*shape '\[7\]' is invalid") as caught:
        capture(lambda x: x.view(7), [torch.ones(4)], backend=backend, name="bad")
    assert "\n" not in str(caught.value)


def test_a_graph_break_is_a_capture_error_with_the_users_line():
    def broken(x):
        print("side effect")
        return x

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError) as caught:
        capture(broken, [torch.ones(1)], backend="aot_eager", name="decode")
    text = str(caught.value)
    assert text.startswith(
        f"decode: graph break, expected one full graph: {__file__}:{line}: Failed to trace builtin"
    )
    assert "print" in text and "\n" not in text


def test_an_unknown_backend_lists_those_there_are():
    with pytest.raises(CaptureError, match="unknown backend 'inducter'; expected one of eager, "):
        capture(Cache(), example_inputs(), backend="inducter")


def test_an_input_that_cannot_be_captured_is_a_type_error():
    with pytest.raises(TypeError, match="'x' is a set; expected tensors, constants"):
        capture(Cache(), [{1, 2}], backend="eager")


def test_backends_that_need_nothing_work_everywhere():
    backends = available_backends()
    assert backends["eager"] is None and backends["aot_eager"] is None


class Recorder(Backend):
    """A backend that never works, or that records its specs."""

    name = "recorder"
    options = None

    def __init__(self, reason=None):
        self.reason = reason
        self.closed = 0

    def available(self):
        return self.reason

    def capture(self, job):
        self.spec = job.spec
        return Frozen(job.function, static_inputs=tuple(job.examples), close=self._close)

    def _close(self):
        self.closed += 1


def test_a_backend_object_takes_part_like_a_named_one():
    backend = Recorder()
    x = torch.ones(2)
    graph = capture(lambda x: x + 1, [x], backend=backend, name="g", warm_runs=2, pool=7)
    spec = backend.spec
    assert (spec.name, spec.warm_runs, dict(spec.options)) == ("g", 2, {"pool": 7})
    assert graph.static_inputs[0] is x
    assert graph.run(x).tolist() == [2, 2]
    graph.close()
    graph.close()
    assert backend.closed == 1 and graph.static_inputs == ()


def test_a_backend_that_is_not_available_says_why():
    with pytest.raises(CaptureError, match="backend 'recorder' is not available: no such device"):
        capture(Cache(), example_inputs(), backend=Recorder("no such device"))
