"""Cases: what a graph computes and returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphs.backends.conformance.case import Refused, Subject, case, expect, expect_same
from graphs.errors import InputMismatch

_DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def _scores(x: Tensor, weight: Tensor) -> Tensor:
    return torch.softmax(x @ weight, -1) * 2 - x.sum(-1, keepdim=True)


@case("a graph computes what its callable computes, as exactly")
def values(subject: Subject) -> None:
    """Three inputs against eager and against float64."""
    graph = subject.capture(_scores, subject.rand(5, 8), subject.rand(8, 8))
    for _ in range(3):
        x, weight = subject.rand(5, 8), subject.rand(8, 8)
        got, eager = graph.run(x, weight).cpu(), _scores(x, weight).cpu()
        exact = _scores(x.cpu().double(), weight.cpu().double())
        error, allowed = (float((each.double() - exact).abs().max()) for each in (got, eager))
        expect_same(got, eager)
        expect(
            error <= 4 * allowed + 1e-6,
            f"the error against float64 is {error:.2g}, of eager {allowed:.2g}",
        )


@case("each dtype that it captures gives what eager gives", may_refuse=True)
def dtypes(subject: Subject) -> None:
    """All at once; where that is refused, each by itself."""

    def function(*tensors: Tensor) -> list[Tensor]:
        return [each.logical_not() if each.dtype is torch.bool else each * 3 for each in tensors]

    def check(*some: torch.dtype) -> None:
        graph = subject.capture(function, *(subject.rand(4, dtype=dtype) for dtype in some))
        inputs = [subject.rand(4, dtype=dtype) for dtype in some]
        expect_same(graph.run(*inputs), function(*inputs))

    try:
        check(*_DTYPES)
    except Refused as refused:
        refusals = [refused]
        for dtype in _DTYPES:
            try:
                check(dtype)
            except Refused as error:
                refusals.append(error)
        if len(refusals) > len(_DTYPES):
            raise


@case("every run reads the inputs that it is given, wherever they lie")
def inputs_are_read_anew(subject: Subject) -> None:
    """New tensors, and one that is filled again."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    same = subject.rand(4)
    graph = subject.capture(function, same, subject.rand(4))
    for step in range(8):
        x = same if step % 2 else subject.rand(4)
        x.copy_(subject.rand(4))
        y = subject.rand(4)
        expect_same(graph.run(x, y), function(x, y), f"in run {step + 1}")


@case("an input that is a view, with any strides and offset, is read as what it is")
def layouts_of_inputs(subject: Subject) -> None:
    """A transposed, a sliced and a strided one."""

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a @ b + c

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        wide = subject.rand(7, 9)
        return wide[1:5, 2:6].t(), subject.rand(4, 6)[:, ::2], subject.rand(9, 3)[1::2]

    graph = subject.capture(function, *inputs())
    for _ in range(2):
        given = inputs()
        expect_same(graph.run(*given), function(*given))


@case("an input with strides of 0 is read as what it is", may_refuse=True)
def expanded_inputs(subject: Subject) -> None:
    """A row for all rows."""

    def function(x: Tensor) -> Tensor:
        return x * 2 + 1

    graph = subject.capture(function, subject.rand(1, 3).expand(4, 3))
    x = subject.rand(1, 3).expand(4, 3)
    expect_same(graph.run(x), function(x))


@case("an output has the strides that the callable gives it")
def layouts_of_outputs(subject: Subject) -> None:
    """Transposed, sliced and contiguous ones."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return y.t(), (x * 2)[:, 1:], (y * 3).t().contiguous()

    graph = subject.capture(function, subject.rand(4, 6))
    x = subject.rand(4, 6)
    got, expected = graph.run(x), function(x)
    expect_same(got, expected)
    strides, eager = ([each.stride() for each in outputs] for outputs in (got, expected))
    expect(strides == eager, f"expected strides {eager}, got {strides}")


class Pair(NamedTuple):
    """A structure of its own."""

    first: Tensor
    second: Any


@case("outputs have the structure that the callable gives them, constants in it included")
def structures(subject: Subject) -> None:
    """Dictionaries, lists and tuples in each other."""

    def function(x: Tensor) -> Any:
        return {"list": [x + 1, 3, "name", None], "tuple": (True, {"deep": x - 1})}

    graph = subject.capture(function, subject.rand(3))
    x = subject.rand(3)
    expect_same(graph.run(x), function(x))


@case("outputs may be named tuples, which keep their class", may_refuse=True)
def named_tuples(subject: Subject) -> None:
    """A pair."""

    def function(x: Tensor) -> Pair:
        return Pair(x * 2, None)

    graph = subject.capture(function, subject.rand(3))
    x = subject.rand(3)
    expect_same(graph.run(x), function(x))


@case("tensors without elements are inputs and outputs as any other", may_refuse=True)
def empty_tensors(subject: Subject) -> None:
    """No rows."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.cat([x, y]) + 1

    graph = subject.capture(function, subject.rand(0, 3), subject.rand(2, 3))
    inputs = subject.rand(0, 3), subject.rand(2, 3)
    expect_same(graph.run(*inputs), function(*inputs))


@case("an input that is no tensor is a constant of the graph, and another value is an error")
def constants(subject: Subject) -> None:
    """Of each kind."""

    def function(x: Tensor, n: int, scale: float, flag: bool, name: str, no: None) -> Tensor:
        y = x * n if flag and no is None else x
        return y * scale if name == "scaled" else y

    given: tuple[Any, ...] = 3, 0.5, True, "scaled", None
    x = subject.rand(3)
    graph = subject.capture(function, x, *given)
    expect_same(graph.run(x, *given), function(x, *given))
    others: tuple[Any, ...] = 4, 0.25, False, "other", 1
    for at, other in enumerate(others):
        try:
            got = graph.run(x, *given[:at], other, *given[at + 1 :])
        except InputMismatch:
            continue
        raise AssertionError(f"ran with {other!r} instead of {given[at]!r} and returned {got}")


@case("random numbers are drawn anew in every run, from torch's generator", may_refuse=True)
def random_numbers(subject: Subject) -> None:
    """The same seed gives the same numbers, the next run others."""

    def function(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    x = torch.zeros(64, device=subject.device)
    graph = subject.capture(function, x)
    first, second = graph.run(x).clone(), graph.run(x).clone()
    expect(not torch.equal(first, second), "two runs drew the same numbers")
    torch.manual_seed(3)
    first = graph.run(x).clone()
    torch.manual_seed(3)
    expect_same(graph.run(x), first, "with the same seed")
    expect(bool(((first >= 0) & (first < 1)).all()), "they are not in [0, 1)")


@case("no output has a gradient where the callable's has none, and none is lost silently")
def gradients(subject: Subject) -> None:
    """Without a grad mode; then with one, which may be refused."""
    module = _Scale(subject.rand(3))
    weight, x = module.weight, subject.rand(3)
    out = subject.capture(module, x).run(x)
    expect(not out.requires_grad, "an output requires a gradient under torch.no_grad()")
    with torch.enable_grad():
        try:
            graph = subject.capture(module, x)
        except Refused:
            return
        out = graph.run(x)
        expect(out.requires_grad, "an output has lost its gradient: refuse the capture")
        out.sum().backward()
    assert weight.grad is not None
    expect_same(weight.grad, x, "as the gradient")


class _Scale(torch.nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
