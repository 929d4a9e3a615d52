import contextlib
import gc

import pytest
import torch
from torch import nn

from graphs import InputMismatch, ModeMismatch, StaleGraph, capture
from graphs.capture.inputs import with_own_code
from graphs.torch_internals import direct_call
from graphs.torch_internals.direct_call import direct_path

pytestmark = pytest.mark.usefixtures("no_grad")

SCALE = 3


class Step(nn.Module):
    """Uses its first two inputs, and looks at neither of the other two."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sum", torch.zeros(4))
        self.factor = 2

    def forward(self, x, y, unused=None, unused_number=7):
        self.sum.add_(x)
        return (x + y) * self.factor * SCALE


def examples():
    return [torch.ones(4), torch.ones(4), torch.ones(3), 7]


@pytest.fixture
def wrapper_calls(monkeypatch):
    """How often a captured graph goes through torch.compile's wrapper."""
    from graphs.backends import inductor

    calls = []
    original = inductor.compile_once

    def counting(*settings, **how):
        compiled = original(*settings, **how)

        def call(*inputs):
            calls.append(inputs)
            return compiled(*inputs)

        return call

    monkeypatch.setattr(inductor, "compile_once", counting)
    return calls


def test_a_run_that_fits_does_not_go_through_the_wrapper(wrapper_calls):
    module = Step()
    graph = capture(module, examples(), backend="aot_eager")
    assert len(wrapper_calls) == 1
    module.sum.zero_()
    for count in range(1, 4):
        assert graph.run(*examples()).tolist() == [12.0] * 4
        assert module.sum.tolist() == [count] * 4
    assert len(wrapper_calls) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, y, z, n: (x.double(), y, z, n), "'x' has dtype float64"),
        (lambda x, y, z, n: (x, y[:1].expand(4), z, n), r"'y' has stride \(0,\)"),
        (lambda x, y, z, n: (x, y[:2], z, n), r"'y' has shape \(2,\)"),
        (lambda x, y, z, n: (x, y.to("meta"), z, n), "'y' has device meta"),
        (lambda x, y, z, n: (x, y, z.int(), n), "'unused' has dtype int32"),
        (lambda x, y, z, n: (x, y, z[:2], n), r"'unused' has shape \(2,\)"),
        (lambda x, y, z, n: (x, y, None, n), "'unused' is a NoneType"),
        (lambda x, y, z, n: (x, y, z, 8), "'unused_number' is 8, captured 7"),
        (lambda x, y, z, n: (x, y, z, 7.0), "'unused_number' is 7.0, captured 7"),
        (lambda x, y, z, n: (x, y, z, n, n), "5 inputs, captured 4"),
    ],
)
def test_an_input_that_differs_is_refused_before_the_graph_runs(change, text, wrapper_calls):
    module = Step()
    graph = capture(module, examples(), backend="aot_eager")
    before = module.sum.clone()
    with pytest.raises(InputMismatch, match=text):
        graph.run(*change(*examples()))
    assert module.sum.tolist() == before.tolist()
    assert len(wrapper_calls) == 1


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_another_mode_is_refused_before_the_graph_runs(mode):
    module = Step()
    graph = capture(module, examples(), backend="aot_eager")
    before = module.sum.clone()
    inputs = examples()
    with mode(), pytest.raises(ModeMismatch):
        graph.run(*inputs)
    assert module.sum.tolist() == before.tolist()


def test_a_graph_captured_in_inference_mode_runs_in_it_only():
    module = Step()
    with torch.inference_mode():
        graph = capture(module, examples(), backend="aot_eager")
        graph.run(*examples())
    with pytest.raises(ModeMismatch, match="inference_mode is False, captured True"):
        graph.run(*examples())


def test_a_changed_global_or_attribute_is_seen_and_so_is_its_return(monkeypatch):
    module = Step()
    graph = capture(module, examples(), backend="aot_eager")
    for change in (
        lambda: monkeypatch.setattr(module, "factor", 5),
        lambda: monkeypatch.setitem(globals(), "SCALE", 4),
    ):
        change()
        with pytest.raises(StaleGraph):
            graph.run(*examples())
        monkeypatch.undo()
        assert graph.run(*examples()).tolist() == [12.0] * 4


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.factor = 1.0
        self.factors = [1.0]
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        shifted = x @ self.weight + self.shift if self.training else x @ self.weight
        return shifted * self.factor * self.factors[0]


def nested():
    """Three levels of modules, as a model has."""
    return nn.Sequential(*(nn.Sequential(*(Leaf() for _ in range(3))) for _ in range(2))).eval()


CHANGES = {
    "a number": lambda leaf: setattr(leaf, "factor", 2.0),
    "a number in a list": lambda leaf: leaf.factors.__setitem__(0, 2.0),
    "the mode": lambda leaf: leaf.train(),
    "a dtype": lambda leaf: setattr(leaf, "weight", nn.Parameter(torch.ones(4, 4).double())),
    "a dtype behind a parameter": lambda leaf: setattr(
        leaf.weight, "data", torch.ones(4, 4).double()
    ),
    "strides behind a parameter": lambda leaf: setattr(
        leaf.weight, "data", torch.ones(8, 4).t()[:, ::2]
    ),
    "a size behind a parameter": lambda leaf: setattr(leaf.weight, "data", torch.ones(4, 8)),
    "whether it learns": lambda leaf: leaf.weight.requires_grad_(False),
    "its forward": lambda leaf: setattr(leaf, "forward", lambda x: x * 7),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_deep_inside_makes_a_graph_stale_that_has_run_before(change):
    module = nested()
    graph = capture(module, [torch.ones(2, 4)], backend="aot_eager")
    for _ in range(4):  # guards remember what they have seen unchanged
        graph.run(torch.ones(2, 4))
    change(module[1][2])
    with pytest.raises(StaleGraph):
        graph.run(torch.ones(2, 4))


def test_an_object_that_is_replaced_by_another_makes_the_graph_stale():
    module = nn.Module()
    module.act = nn.ReLU()
    graph = capture(lambda x: module.act(x), [torch.ones(2)], backend="aot_eager")
    module.act = nn.Tanh()
    gc.collect()
    with pytest.raises(StaleGraph):
        graph.run(torch.ones(2))


def test_inputs_that_become_one_tensor_do_not_run_a_graph_made_for_two():
    def move(target, x):
        target.add_(1)
        return target + x

    graph = capture(move, [torch.zeros(2), torch.zeros(2)], backend="aot_eager")
    both = torch.zeros(2)
    with pytest.raises(StaleGraph):
        graph.run(both, both)
    assert both.tolist() == [0, 0]


def test_a_new_buffer_of_the_same_layout_is_used_at_once():
    module = Step()
    graph = capture(module, examples(), backend="aot_eager")
    module.sum = torch.full((4,), 10.0)
    graph.run(*examples())
    assert module.sum.tolist() == [11.0] * 4


def test_after_a_reset_of_dynamo_the_graph_is_right_or_refuses():
    module = Step()
    graph = capture(module, examples(), backend="aot_eager")
    torch._dynamo.reset()
    assert_refuses_or_equals(graph, 12.0)  # torch 2.11 refuses
    module.factor = 3
    assert_refuses_or_equals(graph, 18.0)


def assert_refuses_or_equals(graph, value):
    with contextlib.suppress(StaleGraph):
        assert graph.run(*examples()).tolist() == [value] * 4


def test_where_dynamo_keeps_its_guards_otherwise_runs_go_through_the_wrapper(
    wrapper_calls, monkeypatch
):
    monkeypatch.setattr(
        direct_call, "_direct_path", lambda *_: (_ for _ in ()).throw(AttributeError())
    )
    module = Step()
    graph = capture(module, examples(), backend="aot_eager")
    assert graph.run(*examples()).tolist() == [12.0] * 4
    assert len(wrapper_calls) == 2
    with pytest.raises(InputMismatch):
        graph.run(*examples()[:3], 8)
    module.factor = 9
    with pytest.raises(StaleGraph):
        graph.run(*examples())


def test_a_function_that_is_not_compiled_has_no_direct_path():
    assert direct_path(with_own_code(Step(), "step"), examples()) is None


def test_guards_that_do_not_see_the_grad_mode_are_not_relied_on(monkeypatch):
    function = with_own_code(Step(), "step")
    torch.compile(function, backend="aot_eager", fullgraph=True)(*examples())
    assert direct_path(function, examples()) is not None
    monkeypatch.setattr(torch, "set_grad_enabled", lambda _: torch.no_grad())
    assert direct_path(function, examples()) is None


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, 1, 2.5, 0.0, "text", torch.ones(3), torch.ones(()), torch.ones(0, 2)),
        *(torch.ones(2, dtype=torch.bool), torch.ones(1, dtype=torch.complex128)),
        *(torch.ones(2, dtype=torch.bfloat16), nn.Parameter(torch.ones(2))),
    ],
    ids=repr,
)
def test_what_is_tried_in_place_of_an_example_differs_from_it(value):
    from graphs.capture.inputs import InputSpec

    spec = InputSpec.of("x", value)
    wrong = (
        direct_call._wrong_tensors
        if isinstance(value, torch.Tensor)
        else direct_call._wrong_constants
    )
    tried = [*wrong(value)]
    assert len(tried) >= 2
    assert all(spec.mismatch(other) is not None for other in tried)
