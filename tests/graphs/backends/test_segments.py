"""Recordings that are cut at functions marked with `eager_between`, against eager runs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from graphs import CaptureError, StaleGraph, capture, eager_between
from graphs.backends.cudagraph import CudaGraphBackend
from tests.graphs.backends.dispatch_double import DispatchDouble

pytestmark = pytest.mark.usefixtures("no_grad")


@eager_between
def varlen_sum(x, lengths):
    """A kernel with metadata on the host: sums of consecutive rows, as long as `lengths` says."""
    assert sum(lengths) == len(x)
    return torch.stack([part.sum(0) for part in x.split(lengths)])


@eager_between
def order(x):
    """Sizes that only the data decides, in between."""
    return x[torch.nonzero(x[:, 0] > 0).flatten()].sum(0)


class Block(nn.Module):
    def __init__(self, lengths) -> None:
        super().__init__()
        self.lengths = lengths
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        y = varlen_sum(x @ self.weight, self.lengths)
        return torch.relu(y) + x[:2] + self.calls


class Model(nn.Module):
    """Two blocks, and marked functions first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = [1, 3]
        self.blocks = nn.ModuleList(Block(self.lengths) for _ in range(2))

    def forward(self, x):
        total = order(x)
        low = self.blocks[0](x)
        high = self.blocks[1](x * 2) * total
        return varlen_sum(low + high, [1, 1]), low


def recorded(function, *inputs, recorder=None, **options):
    backend = CudaGraphBackend(lambda: recorder or DispatchDouble())
    return capture(function, inputs, backend=backend, compiler="eager", **options)


def check(graph, function, *inputs):
    got, expected = graph.run(*inputs), function(*inputs)
    torch.testing.assert_close(got, expected)


def test_every_replay_equals_eager_with_its_inputs_and_metadata():
    torch.manual_seed(0)
    model, eager = Model(), Model()
    eager.load_state_dict(model.state_dict())
    recorder = DispatchDouble()
    graph = recorded(model, torch.randn(4, 3), recorder=recorder)
    assert len(recorder.tapes) == 5  # between four calls of marked functions
    eager.load_state_dict(model.state_dict())
    for lengths in ([1, 3], [2, 2], [3, 1], [4, 0]):
        model.lengths[:] = eager.lengths[:] = lengths
        check(graph, lambda x: eager(x), torch.randn(4, 3))
    assert model.blocks[0].calls == 2 + 4  # captured by two runs


def test_results_of_a_marked_function_lie_where_the_next_segment_reads():
    addresses = []

    @eager_between
    def middle(x):
        return {"twice": x * 2, "rows": len(x), "none": None}

    def function(x):
        made = middle(x + 1)
        addresses.append(made["twice"].data_ptr())
        return made["twice"] + made["rows"]

    graph = recorded(function, torch.ones(3))
    runs = len(addresses)
    first = graph.run(torch.ones(3))
    assert first.tolist() == [7, 7, 7]
    second = graph.run(torch.zeros(3))
    assert second.data_ptr() == first.data_ptr() and second.tolist() == [5, 5, 5]
    assert len(addresses) == runs  # Python between the marked functions ran at the capture only


def test_outside_of_a_capture_and_in_backend_eager_it_is_the_function():
    assert varlen_sum(torch.ones(3, 1), [1, 2]).tolist() == [[1], [2]]
    assert varlen_sum.__name__ == "varlen_sum"
    lengths = [1, 2]
    graph = capture(lambda x: varlen_sum(x, lengths), [torch.ones(3, 1)], backend="eager")
    lengths[:] = [2, 1]
    assert graph.run(torch.ones(3, 1)).tolist() == [[2], [1]]
    with pytest.raises(TypeError, match="eager_between: expected a function, got a int"):
        eager_between(3)


def test_what_is_written_in_place_across_a_cut_is_written():
    @eager_between
    def halve(x):
        x.mul_(0.5)
        return x

    @eager_between
    def tail(x):
        return x[1:]

    def function(x, out):
        y = x + 1
        z = halve(y)
        z.add_(1)  # the same memory as y
        tail(y).zero_()
        out.copy_(y)
        return y + z

    graph = recorded(function, torch.zeros(3), torch.zeros(3))
    for _ in range(3):
        x, here, there = torch.randn(3), torch.zeros(3), torch.zeros(3)
        torch.testing.assert_close(graph.run(x, here), function(x, there))
        assert torch.equal(here, there)


def test_results_that_share_memory_share_it_between_the_segments_too():
    @eager_between
    def two(x):
        y = x.clone()
        return y, y[1:]

    def function(x):
        whole, tail = two(x)
        tail.mul_(10)
        return whole + 0

    graph = recorded(function, torch.zeros(3))
    for value in (1.0, 2.0):
        check(graph, function, torch.full((3,), value))


def test_a_tensor_of_its_own_that_it_returns_stays_that_tensor():
    workspace = torch.zeros(2)

    @eager_between
    def into_workspace(x):
        return torch.add(x, 1, out=workspace)

    def function(x):
        into_workspace(x).mul_(3)
        return workspace * 1

    graph = recorded(function, torch.zeros(2))
    assert graph.run(torch.ones(2)).tolist() == [6, 6] == workspace.tolist()


def test_fresh_outputs_outlive_the_next_replay():
    graph = recorded(lambda x: order(x) * 2, torch.ones(2, 2), fresh_outputs=True)
    first = graph.run(torch.ones(2, 2))
    graph.run(torch.zeros(2, 2))
    assert first.tolist() == [4, 4]


class Side:
    """What goes around the results of a function."""

    value = None


def hides(side):
    @eager_between
    def hidden(x):
        side.value = x * 2
        return x + 1

    return hidden


@pytest.mark.parametrize("use", ["segment", "argument", "output"])
def test_a_tensor_that_a_marked_function_does_not_return_is_refused(use):
    side = Side()
    hidden = hides(side)

    def function(x):
        y = hidden(x)
        if use == "segment":
            return y + side.value
        return order(side.value[None]) if use == "argument" else (y, side.value)

    with pytest.raises(CaptureError, match=r"'hidden' makes a tensor of shape .*\b2,?\), float32"):
        recorded(function, torch.ones(2))


def test_a_tensor_of_a_segment_that_is_no_argument_is_refused():
    side = Side()

    @eager_between
    def reads(x):
        return x + side.value

    @eager_between
    def returns(x):
        return side.value

    for marked in (reads, returns):

        def function(x, marked=marked):
            side.value = x * 3
            return marked(x) + 1

        with pytest.raises(
            CaptureError, match=rf"'{marked.__name__}' re.* a recorded segment makes"
        ):
            recorded(function, torch.ones(2))


def test_a_marked_function_may_have_tensors_and_a_state_of_its_own():
    side = Side()

    @eager_between
    def plan(x):
        side.value = x.sum(0, keepdim=True)
        return x + 0

    @eager_between
    def run(x):
        return x - side.value  # of this replay

    def function(x):
        return run(plan(x * 2)) * 2

    graph = recorded(function, torch.zeros(3, 1))
    for _ in range(2):
        check(graph, function, torch.randn(3, 1))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (lambda x: x[:1], r"'changing' returned a tensor of shape \(1,\), .* recorded .*\(2,\)"),
        (lambda x: x.double(), "returned a tensor of shape .* float64, recorded .* float32"),
        (lambda x: (x, x), "return the same structure"),
        (lambda x: 5, "'changing' returned"),
    ],
)  # fmt: skip
def test_a_result_that_changes_its_layout_is_an_error_and_the_graph_stays_usable(later, message):
    side = Side()

    @eager_between
    def changing(x):
        return x * 2 if side.value is None else side.value(x * 2)

    graph = recorded(lambda x: changing(x) + 1, torch.zeros(2))
    side.value = later
    with pytest.raises(CaptureError, match=message):
        graph.run(torch.ones(2))
    side.value = None
    assert graph.run(torch.ones(2)).tolist() == [3, 3]


def test_a_constant_result_has_to_stay_as_python_saw_it():
    side = Side()
    side.value = 2

    @eager_between
    def number(x):
        return x + 0, side.value

    def function(x):
        y, factor = number(x)
        return y * factor

    graph = recorded(function, torch.zeros(2))
    assert graph.run(torch.ones(2)).tolist() == [2, 2]
    side.value = 3
    with pytest.raises(CaptureError, match="'number' returned 3, recorded 2"):
        graph.run(torch.ones(2))


def test_an_exception_in_a_replay_is_the_callers_and_the_next_replay_is_right():
    side = Side()

    @eager_between
    def fails(x):
        if side.value:
            raise KeyError("no such request")
        return x * 2

    def function(x, out):
        out.add_(1)
        return fails(x + 1) + out

    graph = recorded(function, torch.zeros(2), torch.zeros(2))
    side.value, out = True, torch.zeros(2)
    with pytest.raises(KeyError, match="no such request"):
        graph.run(torch.ones(2), out)
    assert out.eq(0).all()
    side.value = False
    assert graph.run(torch.ones(2), out).tolist() == [5, 5] and out.eq(1).all()


def test_a_failing_capture_frees_its_segments():
    recorder, calls = DispatchDouble(), []

    @eager_between
    def sometimes(x):
        return x + 1

    def function(x):
        calls.append(0)
        y = x * 2
        if len(calls) == 3:  # the recording
            raise RuntimeError("out of memory")
        return sometimes(y)

    with pytest.raises(CaptureError, match="out of memory"):
        recorded(function, torch.zeros(2), recorder=recorder)
    assert [tape.resets for tape in recorder.tapes] == [1]
    calls.clear()

    def other(x):
        calls.append(0)
        return sometimes(x) if len(calls) < 3 else x

    with pytest.raises(CaptureError, match="'sometimes' is not called any more"):
        recorded(other, torch.zeros(2))


def test_settings_that_a_replay_would_not_enter_are_refused():
    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return order(x @ x)

    with pytest.raises(CaptureError, match=r"'order' is called under other settings .*autocast is"):
        recorded(function, torch.ones(2, 2))


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraph"])
def test_what_compiles_refuses_it_with_the_remedy(backend, fresh_compiler):
    with pytest.raises(CaptureError, match=r"'order' is marked .* compiler='eager'"):
        if backend == "cudagraph":
            double = CudaGraphBackend(DispatchDouble)
            capture(order, [torch.ones(2, 2)], backend=double, compiler="aot_eager")
        else:
            capture(lambda x: order(x) + 1, [torch.ones(2, 2)], backend=backend)


def test_parts_may_be_compiled_by_themselves(fresh_compiler):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def part(x):
        return torch.relu(x) * 2

    def function(x):
        return part(order(part(x))) + 1

    graph = recorded(function, torch.ones(2, 2))
    for _ in range(2):
        check(graph, function, torch.randn(2, 2))


def test_torch_compile_breaks_at_marked_functions_and_its_parts_are_recorded(fresh_compiler):
    model, recorder = Block([1, 3]), DispatchDouble()
    compiled = torch.compile(model, backend="aot_eager")
    graph = recorded(compiled, torch.randn(4, 3), recorder=recorder)
    assert len(recorder.tapes) == 2
    eager = Block(model.lengths)
    eager.load_state_dict(model.state_dict())
    for lengths in ([2, 2], [3, 1]):
        model.lengths[:] = lengths
        check(graph, lambda x: eager(x), torch.randn(4, 3))


def test_an_attribute_that_changes_makes_the_graph_stale():
    model = Model()
    graph = recorded(model, torch.randn(4, 3))
    model.blocks[1].lengths = [2, 2]
    with pytest.raises(StaleGraph, match=r"blocks\.1\.lengths was replaced"):
        graph.run(torch.randn(4, 3))


def test_closing_frees_segments_and_what_lies_between_them():
    recorder, kept = DispatchDouble(), []

    @eager_between
    def marked(x):
        return x + 1

    def function(x):
        y = marked(x * 2)
        kept.append(weakref.ref(y))
        return y * 2

    graph = recorded(function, torch.zeros(2), recorder=recorder)
    assert kept[-1]() is not None
    graph.close()
    del graph
    gc.collect()
    assert kept[-1]() is None and all(tape.resets == 1 for tape in recorder.tapes)
