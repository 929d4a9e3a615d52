import contextlib
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from graphs import GraphBudgetExceeded, ModeMismatch, capture, no_compile

FACTOR = 2


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = 1
        self.factors = [1]
        self.activation = torch.sin
        self.dropout = nn.Dropout()
        self.eval()

    def forward(self, x, power=1):
        for factor in self.factors:
            x = x * factor
        return self.dropout(self.activation(x) * FACTOR + self.offset) ** power


def warm(function, *inputs, **options):
    compiled = torch.compile(function, backend="eager", dynamic=False, **options)
    compiled(*inputs)
    return compiled


@contextlib.contextmanager
def changed(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


def called(*inputs, under=contextlib.nullcontext):
    """A change that calls the compiled function on other inputs, or in another context."""

    def change(compiled, module):
        with under():
            compiled(*(inputs or (X,)))

    return change


def after(code):
    """A change of the module before a call like the one of the warmup."""

    def change(compiled, module):
        exec(f"module.{code}")
        compiled(X)

    return change


def one_more_thread():
    threads = torch.get_num_threads()
    return changed(torch.set_num_threads, threads + 1, threads)


bfloat16, on_meta = partial(torch.autocast, "cpu"), partial(torch.device, "meta")
float64 = partial(changed, torch.set_default_dtype, torch.float64, torch.float32)
deterministic = partial(changed, torch.use_deterministic_algorithms, True, False)
seven = partial(changed, partial(globals().__setitem__, "FACTOR"), 7, 2)


def of_inference_mode():
    with torch.inference_mode():
        return torch.ones(4, 4)


def broken(x):
    torch._dynamo.graph_break()
    return x + 1


def call_a_new_callable(compiled, module):
    torch.compile(lambda x: x - 1, backend="eager")(X)


def call_with_a_graph_break(compiled, module):
    torch.compile(broken, backend="eager")(X)


class Case(NamedTuple):
    change: Callable[..., None]
    cause: str
    remedy: str
    kind: str = "recompile"


X = torch.ones(4, 4)
GRAD_X = torch.ones(4, 4, requires_grad=True)
SET_BEFORE = "set it before the warmup"
FIRST = "call it once in the warmup"
CASES = {
    "shape": Case(called(X[:3]), "'x' size mismatch at index 0. expected 4, actual 3", "pad it"),
    "rank": Case(called(X[None]), "'x' rank mismatch. expected 2, actual 3", "of dimensions"),
    "dtype": Case(called(X.double()), "dtype mismatch. expected Float, actual Double", "convert"),
    "stride": Case(called(X.t()), "'x' stride mismatch at index 0. expected 4", ".contiguous()"),
    "device": Case(called(X.to("meta")), "'x' is on another device: expected cpu", "move it"),
    "gradient": Case(called(GRAD_X), "'x' requires_grad mismatch", "detach it"),
    "subclass": Case(called(nn.Parameter(X)), "'x' is a Parameter", "class of tensor of the"),
    "constant": Case(called(X, 2), "power is no longer 1", "warm up with the value that serves"),
    "no_grad": Case(called(under=torch.no_grad), "grad mode changed", "such as torch.no_grad()"),
    "inference mode": Case(called(under=torch.inference_mode), "grad mode changed", "no_grad()"),
    "inference tensor": Case(called(of_inference_mode()), "inference mode changed", "the same one"),
    "autocast": Case(called(under=bfloat16), "autocast was switched", "same autocast setting"),
    "device context": Case(called(under=on_meta), "torch function mode", "inside the same ones"),
    "threads": Case(called(under=one_more_thread), "the thread count changed", SET_BEFORE),
    "default dtype": Case(called(under=float64), "the default dtype changed", SET_BEFORE),
    "determinism": Case(called(under=deterministic), "determinism setting changed", SET_BEFORE),
    "attribute": Case(after("offset = 5"), "self.offset is no longer 1", "make it a tensor"),
    "list": Case(after("factors += [5]"), "len(self.factors) is no longer 1", "make it a tensor"),
    "function": Case(after("activation = torch.cos"), "activation has another object", "leave it"),
    "training": Case(after("train()"), "self.dropout.training is no longer False", "leave it"),
    "global": Case(called(under=seven), "global FACTOR is no longer 2", "pass it as a tensor"),
    "new callable": Case(call_a_new_callable, "compile of <lambda>", FIRST, "compile"),
    "graph break": Case(call_with_a_graph_break, "compile of broken", FIRST, "compile"),
}
EACH_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def nothing_compiled_and_factor_restored():
    torch._dynamo.reset()
    yield
    globals()["FACTOR"] = 2


@EACH_CASE
def test_a_late_compile_is_an_error_that_names_its_cause_and_the_remedy(case):
    module = Scaled()
    compiled = warm(module, torch.ones(4, 4), fullgraph=True)
    with no_compile() as sentinel:
        compiled(torch.ones(4, 4))
        with pytest.raises(GraphBudgetExceeded) as caught:
            case.change(compiled, module)
    text = str(caught.value)
    assert case.cause in text and case.remedy in text and "\n" not in text
    assert f"({__file__}:" in text
    assert caught.value.event.kind == case.kind
    assert [event.kind for event in sentinel.events] == [case.kind]


@EACH_CASE
def test_a_late_compile_is_counted_and_warned_of_once_otherwise(case, caplog):
    module = Scaled()
    compiled = warm(module, torch.ones(4, 4))
    with caplog.at_level("WARNING", "graphs"), no_compile(strict=False) as sentinel:
        case.change(compiled, module)
    assert sentinel.compiles >= 1
    assert sentinel.events[0].kind == case.kind
    assert case.cause in caplog.messages[0] and case.remedy in caplog.messages[0]
    assert len(caplog.messages) == len({event.function for event in sentinel.events})


def test_the_same_cause_is_logged_once_and_counted_each_time(caplog):
    compiled = warm(lambda x: x + 1, torch.ones(1))
    with caplog.at_level("WARNING", "graphs"), no_compile(strict=False) as sentinel:
        for size in range(2, 6):
            compiled(torch.ones(size))
    assert sentinel.compiles == 4
    assert len(caplog.messages) == 1


def test_graph_breaks_are_counted_when_they_are_let_through():
    with no_compile(strict=False) as sentinel:
        call_with_a_graph_break(None, None)
    assert sentinel.graph_breaks == 1
    assert sentinel.compiles == 2


@pytest.mark.parametrize("strict", [True, False])
def test_a_function_beyond_its_recompile_limit_does_not_run_eagerly_unseen(strict):
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = warm(lambda x: x + 1, torch.ones(1))
        with no_compile(strict=strict) as sentinel:
            if strict:
                with pytest.raises(GraphBudgetExceeded, match="refused recompile"):
                    compiled(torch.ones(2))
            else:
                assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert (sentinel.limit_hits, sentinel.compiles) == (1, 0)


def test_nothing_is_compiled_by_a_strict_refusal_and_all_works_again_afterwards():
    compiled = warm(Scaled(), torch.ones(4, 4))
    for _ in range(2):
        with no_compile(), pytest.raises(GraphBudgetExceeded):
            compiled(torch.ones(3, 4))
    assert compiled(torch.ones(3, 4)).shape == (3, 4)
    with no_compile():
        compiled(torch.ones(3, 4))
        compiled(torch.ones(4, 4))


def test_a_backward_that_is_compiled_late_is_named():
    function = torch.compile(lambda x: x.sin().sum(), backend="aot_eager", dynamic=False)
    loss = function(torch.ones(3, requires_grad=True))
    with no_compile(), pytest.raises(GraphBudgetExceeded, match="run its backward in the warmup"):
        loss.backward()


def test_a_kernel_that_is_built_late_is_an_error_before_the_compiler_starts(tmp_path):
    source, library = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    source.write_text("int nothing;")
    command = ["c++", "-shared", str(source), "-o", str(library)]
    with (
        no_compile() as sentinel,
        pytest.raises(GraphBudgetExceeded, match=r"build of kernel.cpp; .*: build it before serv"),
    ):
        subprocess.run(command)
    assert (sentinel.late_builds, sentinel.compiles) == (1, 0)
    assert not library.exists()


def test_a_kernel_that_is_built_late_is_counted_otherwise(caplog):
    with caplog.at_level("WARNING", "graphs"), no_compile(strict=False) as sentinel:
        for _ in range(2):
            subprocess.run(["cc", "no such file.c"], capture_output=True)
    assert sentinel.late_builds == 2
    assert caplog.messages == [
        "after warmup: build of no such file.c; build it before serving, by running it once in the "
        "warmup; more are counted only"
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_late_capture_is_caught_for_every_backend(backend):
    ran = torch.zeros(1)
    with no_compile(), pytest.raises(GraphBudgetExceeded, match=r"capture of decode\[tokens=3\]"):
        capture(lambda x: ran.add_(x), [torch.ones(1)], backend=backend, name="decode[tokens=3]")
    assert ran.item() == 0
    with no_compile(strict=False) as sentinel:
        capture(lambda x: ran.add_(x), [torch.ones(1)], backend=backend)
    assert sentinel.late_captures == 1 and ran.item() == 1


@pytest.fixture
def graph():
    with torch.no_grad():
        yield capture(Scaled(), [torch.ones(4, 4)], backend="aot_eager", name="decode[tokens=4]")


def test_a_captured_graph_whose_guard_fails_is_named(graph):
    globals()["FACTOR"] = 9
    with no_compile(), pytest.raises(GraphBudgetExceeded) as caught:
        graph.run(torch.ones(4, 4))
    text = str(caught.value)
    assert f"recompile of decode[tokens=4]: global {__name__}.FACTOR is no longer 2" in text
    assert f"(guarded at {Path(__file__).name}:" in text


def test_a_changed_attribute_of_a_captured_module_is_named_as_its_own():
    module = Scaled()
    with torch.no_grad():
        graph = capture(module, [torch.ones(4, 4)], backend="aot_eager", name="decode")
        module.offset = 3
        with no_compile(), pytest.raises(GraphBudgetExceeded) as caught:
            graph.run(torch.ones(4, 4))
    assert "recompile of decode: attribute offset is no longer 1" in str(caught.value)


def test_a_captured_graph_catches_another_thread_count_or_grad_mode_itself(graph):
    with no_compile() as sentinel:
        graph.run(torch.ones(4, 4))
        with torch.enable_grad(), pytest.raises(ModeMismatch, match="grad_enabled"):
            graph.run(torch.ones(4, 4))
        with one_more_thread(), pytest.raises(ModeMismatch, match="threads"):
            graph.run(torch.ones(4, 4))
    assert sentinel.events == ()
