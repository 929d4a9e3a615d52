"""Inputs that overlap at a run but did not at the capture: an error, or the callable's values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graphs import InputMismatch, capture
from graphs.capture.input_overlaps import InputOverlaps
from graphs.store import ArtifactStore, StoredAoti, StoredInductor
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("no_grad")


class Writes(nn.Module):
    """Writes to `x`, reads `y` before and after, and has a buffer that it writes to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("offset", torch.arange(8.0))

    def forward(self, x, y, z):
        x.add_(1)
        self.seen.add_(y * 2)
        return x * 2 + y + z, self.seen + self.offset


EXAMPLES = torch.zeros(8), torch.ones(8), torch.ones(8)


def _backend(name, store):
    kinds = {"inductor": lambda _: "inductor", "aoti": lambda _: "aoti",
             "loaded inductor": StoredInductor, "loaded aoti": StoredAoti}  # fmt: skip
    return kinds[name](store)


# Quick tests are of graphs of inductor, just captured and loaded; those of AOTI differ in the code.
@pytest.fixture(
    scope="module",
    params=slow_but(
        ("inductor", "loaded inductor"), ("inductor", "aoti", "loaded inductor", "loaded aoti")
    ),
)
def captured(request, tmp_path_factory):
    """A graph of a module, and the module."""
    store = ArtifactStore(tmp_path_factory.mktemp("overlaps") / "store")
    with torch.no_grad():
        if request.param.startswith("loaded"):
            capture(Writes(), EXAMPLES, backend=_backend(request.param, store))
        module = Writes()
        graph = capture(module, EXAMPLES, backend=_backend(request.param, store))
    assert graph.is_loaded == request.param.startswith("loaded")
    return graph, module


def _parts(first, second):
    staging = torch.arange(32.0)
    return staging[first : first + 8], staging[second : second + 8], staging[24:32]


def test_parts_of_one_buffer_that_are_apart_run_as_the_callable_does(captured):
    graph, module = captured
    expected = copy.deepcopy(module)(*_parts(0, 8))
    torch.testing.assert_close(graph.run(*_parts(0, 8)), expected)


@pytest.mark.parametrize("second", [1, 7, 0])
def test_an_overlap_with_an_input_that_is_written_is_refused_and_nothing_changes(captured, second):
    graph, module = captured
    inputs, before = _parts(0, second), module.seen.clone()
    for _ in range(2):
        with pytest.raises(InputMismatch, match=r"'x' and 'y' overlap .* writes to 'x': clone\(\)"):
            graph.run(*inputs)
    assert torch.equal(inputs[0], torch.arange(8.0)) and torch.equal(module.seen, before)
    graph.run(*_parts(0, 8))


def test_an_overlap_of_inputs_that_are_only_read_gives_the_values_of_the_callable(captured):
    graph, module = captured
    staging = torch.arange(16.0)
    inputs = torch.zeros(8), staging[:8], staging[4:12]
    expected = copy.deepcopy(module)(torch.zeros(8), *inputs[1:])
    torch.testing.assert_close(graph.run(*inputs), expected)


def test_an_input_inside_a_written_buffer_is_refused(captured):
    graph, module = captured
    with pytest.raises(InputMismatch, match=r"'y' overlaps 'self\.seen' .* writes to 'self\.seen'"):
        graph.run(torch.zeros(8), module.seen, torch.ones(8))


def test_a_written_input_inside_a_read_buffer_is_refused(captured):
    graph, module = captured
    with pytest.raises(InputMismatch, match=r"'x' overlaps 'self\.offset' .* writes to 'x'"):
        graph.run(module.offset.view(8), torch.ones(8), torch.ones(8))


def test_a_read_input_inside_a_read_buffer_equals_the_callable(captured):
    graph, module = captured
    twin = copy.deepcopy(module)
    expected = twin(torch.zeros(8), twin.offset.view(8), torch.ones(8))
    torch.testing.assert_close(
        graph.run(torch.zeros(8), module.offset.view(8), torch.ones(8)), expected
    )


@torch.library.custom_op("test_input_overlaps::put", mutates_args={"target"})
def put(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


@put.register_fake
def _(target, source):
    return None


@pytest.mark.parametrize("backend", slow_but(("inductor",), ("inductor", "aoti")))
def test_a_write_by_a_custom_op_is_seen(backend):
    def write(x, y):
        torch.ops.test_input_overlaps.put(x, y + 1)
        return x * 2 + y

    graph = capture(write, (torch.zeros(8), torch.ones(8)), backend=backend)
    with pytest.raises(InputMismatch, match="writes to 'x'"):
        graph.run(*_parts(0, 4)[:2])


def test_a_graph_that_writes_to_nothing_takes_any_overlap():
    graph = capture(lambda x, y: x * 2 + y, (torch.zeros(8), torch.ones(8)))
    x, y, _ = _parts(0, 4)
    assert torch.equal(graph.run(x, y), x * 2 + y)


def test_parts_of_one_buffer_in_the_examples_are_seen_to_be_written():
    x, y, z = _parts(0, 8)
    graph = capture(lambda x, y, z: x.add_(1) + y + z, (x, y, z))
    with pytest.raises(InputMismatch, match="'x' and 'z' overlap"):
        graph.run(x, y, x.view(8))


def test_tensors_without_a_version_may_be_written():
    with torch.inference_mode():
        graph = capture(lambda x, y: x.add_(1) + y, (torch.zeros(8), torch.ones(8)))
        with pytest.raises(InputMismatch, match="'x' and 'y' overlap"):
            graph.run(*_parts(0, 4)[:2])


def test_what_overlapped_at_the_capture_may_overlap():
    x, y, z = _parts(0, 4)
    check = InputOverlaps(lambda x, y, z: None, (x, y, z), None)
    assert check.hold((x, y, z)) and not check.mismatch((x, y, z))
    both = x, z, z.view(8)
    assert not check.hold(both) and "'y' and 'z'" in check.mismatch(both)


def test_inputs_without_memory_are_not_looked_at():
    nothing = torch.zeros(0)
    check = InputOverlaps(lambda a, b, c, d: None, (nothing, None, 3, nothing), None)
    assert check.hold((nothing, None, 3, nothing))
