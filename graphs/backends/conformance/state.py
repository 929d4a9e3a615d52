"""Cases: what a graph writes, what else it reads, and what fails."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphs.backends.conformance.case import (
    Refused,
    Subject,
    case,
    expect,
    expect_same,
    unless_stale,
)
from graphs.errors import CaptureError, InputMismatch, StaleGraph

_factor = 2.0


class _Counter(nn.Module):
    """Adds up its inputs, and counts its calls."""

    total: Tensor
    calls: Tensor

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, device=subject.device))
        self.register_buffer("calls", torch.zeros(1, device=subject.device))
        self.weight = nn.Parameter(subject.rand(3))
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.total.add_(x.sum(0))
        return self.total * self.weight * self.scale

    def expected(self, x: Tensor) -> Tensor:
        """What a call now would return."""
        return (self.total + x.sum(0)) * self.weight * self.scale


@case("writes in place to buffers of the module happen once in every run, and the caller sees them")
def writes_to_buffers(subject: Subject) -> None:
    """At the capture too, as often as it was to run."""
    module = _Counter(subject)
    graph = subject.capture(module, subject.rand(2, 3), warm_runs=3)
    calls = module.calls.item()
    expect(calls >= 3, f"a capture with warm_runs=3 ran it {calls:g} times")
    module.total.zero_()
    total = torch.zeros(3, device=subject.device)
    for run in range(1, 4):
        x = subject.rand(2, 3)
        expected = module.expected(x)
        total += x.sum(0)
        expect_same(graph.run(x), expected, f"in run {run}")
        expect_same(module.total, total, f"in the buffer after run {run}")
        expect_same(module.calls.item(), calls + run, "as the number of calls")


@case("writes in place to inputs are in the caller's tensors, and in them alone")
def writes_to_inputs(subject: Subject) -> None:
    """By index, through a view, and of a tensor that lies in another."""

    def function(cache: Tensor, new: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        cache.index_copy_(0, index, new)
        cache[:, 1:].mul_(2)
        return cache, cache.sum(0)

    def inputs() -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        around = subject.rand(8, 3)
        return around, (around[2:6], subject.rand(2, 3), torch.tensor([3, 1]).to(subject.device))

    graph = subject.capture(function, *inputs()[1])
    for _ in range(2):
        around, given = inputs()
        copy = around.clone()
        expected = function(copy[2:6], *given[1:])
        before = [each.clone() for each in given[1:]]
        returned, total = graph.run(*given)
        expect_same(total, expected[1])
        expect_same(around, copy, "in and around the tensor that was written to")
        expect_same([*given[1:]], before, "in inputs that are not written to")
        returned.fill_(7)
        expect_same(given[0], returned, "in an input that is returned, and then written to")


@case(
    "inputs that share memory at the capture share it in every run: one sees writes to the other",
    may_refuse=True,
)
def inputs_that_share_memory(subject: Subject) -> None:
    """One is a part of the other."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    both = subject.rand(6)
    graph = subject.capture(function, both, both[1:4])
    both = subject.rand(6)
    expected = (both[1:4] + 1) * 2
    try:
        got = graph.run(both, both[1:4])
    except (InputMismatch, StaleGraph):
        return
    expect_same(got, expected)


@case("inputs that newly share memory are an error where the graph writes to one, or right")
def inputs_that_newly_share_memory(subject: Subject) -> None:
    """They lay apart at the capture."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    graph = subject.capture(function, subject.rand(4), subject.rand(3))
    both = subject.rand(4)
    expected = (both[1:] + 1) * 2
    try:
        got = graph.run(both, both[1:])
    except (InputMismatch, StaleGraph):
        return
    expect_same(got, expected)


@case("an attribute of the module that changes is used, or the graph is stale: never the old value")
def attributes(subject: Subject) -> None:
    """Restored, the graph runs again."""
    module = _Counter(subject)
    x = subject.rand(2, 3)
    graph = subject.capture(module, x)
    module.scale = 5.0
    unless_stale(lambda: graph.run(x), module.expected(x), "after an attribute changed")
    module.scale = 2.0
    expect_same(module.expected(x), graph.run(x), "after an attribute changed back")


@case("a global that changes is used, or the graph is stale, or the backend is `blind_to` it")
def globals_(subject: Subject) -> None:
    """A number."""
    global _factor
    if "globals" in subject.backend.blind_to:
        raise Refused("the backend declares that it is blind to globals")

    def function(x: Tensor) -> Tensor:
        return x * _factor

    x = subject.rand(3)
    graph = subject.capture(function, x)
    try:
        _factor = 3.0
        unless_stale(lambda: graph.run(x), x * 3.0, "after a global changed")
    finally:
        _factor = 2.0


@case("parameters and buffers are read in every run; one that was replaced is used, or it is stale")
def weights(subject: Subject) -> None:
    """Written in place, then replaced."""
    module = _Counter(subject)
    x = subject.rand(2, 3)
    graph = subject.capture(module, x)
    module.weight.mul_(3)
    expected = module.expected(x)
    expect_same(graph.run(x), expected, "after a parameter was written in place")
    module.total.fill_(1)
    expected = module.expected(x)
    expect_same(graph.run(x), expected, "after a buffer was written in place")
    module.weight = nn.Parameter(subject.rand(3))
    unless_stale(lambda: graph.run(x), module.expected(x), "after a parameter was replaced")


@case("graphs of one module share its state, in whatever order they run")
def shared_state(subject: Subject) -> None:
    """Two sizes."""
    module = _Counter(subject)
    graphs = {rows: subject.capture(module, subject.rand(rows, 3)) for rows in (4, 2)}
    for rows in (2, 4, 4, 2):
        x = subject.rand(rows, 3)
        expected = module.expected(x)
        expect_same(graphs[rows].run(x), expected, f"with {rows} rows")


@case("a callable that fails is a CaptureError that names the capture; the next capture works")
def failures(subject: Subject) -> None:
    """By its own error, and by torch's."""

    def raises(x: Tensor) -> Tensor:
        raise ValueError("no such head")

    def mismatched(x: Tensor) -> Tensor:
        return x @ x[:2]

    for function in (raises, mismatched):
        try:
            subject.capture(function, subject.rand(3, 3), name="failing capture")
        except Refused as refused:
            expect(isinstance(refused.__cause__, CaptureError), "it is another error")
            expect("failing capture" in str(refused), f"it does not name the capture: {refused}")
            continue
        raise AssertionError(f"the capture of a callable that fails ({function.__name__}) succeeds")
    x = subject.rand(3)
    expect_same(subject.capture(torch.neg, x).run(x), -x, "after a capture that failed")


@case("inputs that the callable does not write to stay as they are, and outputs are not in them")
def inputs_stay(subject: Subject) -> None:
    """Changed after the run, they leave its outputs alone."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 0, x * 2

    x = subject.rand(4)
    graph = subject.capture(function, x)
    for _ in range(2):
        x = subject.rand(4)
        before = x.clone()
        got = graph.run(x)
        expect_same(x, before, "in the input after the run")
        x.fill_(7)
        expect_same(got, function(before), "after an input was changed")
