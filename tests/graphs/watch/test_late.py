import subprocess
import sys

import pytest
import torch
from torch import nn

from graphs import (
    CompileWatch,
    GraphBudgetExceeded,
    LateFileError,
    WarmupManager,
    explicit,
    late_buckets,
    no_compile,
    warm_up_late,
)
from graphs.cli.app import run_command

CALLS = []


def scale(x, power=1, *, flag=True):
    return x**power if flag else x


def inner(x):
    return x - 1


def broken(x):
    torch._dynamo.graph_break()
    return inner(x) * 2


def labelled(x, label):
    return x + len(label)


class Layer(nn.Module):
    def forward(self, x, mask=None):
        return x if mask is None else x * mask


def eager(function):
    return torch.compile(function, backend="eager", dynamic=False)


compiled = eager(scale)
compiled_broken = eager(broken)
compiled_labelled = eager(labelled)
layer = eager(Layer())


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


@pytest.fixture
def record(tmp_path):
    return tmp_path / "late.jsonl"


def serve():
    """What comes late: new shapes, layouts, constants and modes, in functions and a module."""
    compiled(torch.ones(5))
    with torch.no_grad():
        compiled(torch.ones(2, 3).t(), 2, flag=False)
    with torch.inference_mode():
        layer(torch.ones(3), mask=torch.ones(3, dtype=torch.int64))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(4))


def test_the_next_warmup_takes_what_came_late(record):
    compiled(torch.ones(4))
    with no_compile(strict=False, record=record) as sentinel:
        serve()
    assert sentinel.compiles == 4
    torch._dynamo.reset()  # the next run
    compiled(torch.ones(4))
    report = warm_up_late(record)
    assert (len(report.warmed), report.left, report.compiles) == (4, (), 4)
    with no_compile(record=record):
        serve()
    assert warm_up_late(record).compiles == 0


def test_a_strict_sentinel_records_what_it_refuses(record):
    with no_compile(record=record), pytest.raises(GraphBudgetExceeded):
        compiled(torch.ones(6))
    assert warm_up_late(record, compiled).compiles == 1
    with no_compile():
        compiled(torch.ones(6))


def test_parts_after_a_graph_break_come_with_the_function_that_reaches_them(record):
    with no_compile(strict=False, record=record) as sentinel:
        compiled_broken(torch.ones(3))
    assert sentinel.compiles == 2
    torch._dynamo.reset()
    report = warm_up_late(record)
    assert len(report.warmed) == 2 and report.left == ()
    with no_compile():
        compiled_broken(torch.ones(3))


def test_what_cannot_be_repeated_is_listed_with_its_remedy(record):
    with no_compile(strict=False, record=record):
        compiled_labelled(torch.ones(3), "secret")
        eager(lambda x: x - 1)(torch.ones(2))
        subprocess.run(["cc", "nothing.c"], capture_output=True)
    assert "secret" not in record.read_text()
    torch._dynamo.reset()
    report = warm_up_late(record)
    (labelled_, of_text), (nameless, of_nameless), (build, of_build) = report.left
    assert (labelled_.function, build.function) == ("labelled", "nothing.c")
    assert "input 1 is a str" in of_text and "call it in the warmup" in of_text
    assert "<lambda>" in nameless.function and "call" in of_nameless
    assert "by running it once in the warmup" in of_build
    assert len(str(report).splitlines()) == 4 and report.compiles == 0


def test_a_function_that_fails_on_made_inputs_is_listed(record):
    def picky(x):
        if x.shape[0] == 3:
            raise ValueError("no threes")
        return x

    function = torch.compile(picky, backend="eager", dynamic=False)
    with no_compile(strict=False, record=record), pytest.raises(ValueError):
        function(torch.ones(3))
    ((work, problem),) = warm_up_late(record, function).left
    assert "no threes" in problem and "real inputs" in problem and work.function == "picky"


def test_modules_with_a_compile_of_their_own_are_found_when_they_are_passed(record):
    module = Layer()
    module.compile(backend="eager", dynamic=False)
    with no_compile(strict=False, record=record) as sentinel:
        module(torch.ones(9))
    assert sentinel.compiles == 1
    torch._dynamo.reset()
    report = warm_up_late(record, module)
    assert (report.left, report.compiles) == ((), 1)
    with no_compile():
        module(torch.ones(9))


def test_only_compiled_callables_are_called(record):
    with no_compile(strict=False, record=record):
        compiled(torch.ones(5))
    for target in (scale, Layer(), 3):
        with pytest.raises(TypeError, match="pass the compiled function or module"):
            warm_up_late(record, target)
    ((_, remedy),) = warm_up_late(record, layer).left
    assert remedy
    with no_compile(), pytest.raises(GraphBudgetExceeded):
        torch._dynamo.reset()
        with no_compile():
            warm_up_late(record, compiled)


def test_sizes_that_a_manager_captured_late_become_its_buckets(record):
    def manager(space):
        return WarmupManager(scale, space, lambda bucket: [torch.ones(bucket.rows)], name="decode",
                             backend="eager", overflow="compile", strict=False)  # fmt: skip

    space = explicit(["rows"], [(4,), (8,)])
    first = manager(space)
    first.warmup()
    with no_compile(strict=False, record=record):
        first(dict(rows=20), torch.ones(20))
    ((_, remedy),) = warm_up_late(record).left
    assert "late_buckets" in remedy and "'decode'" in remedy
    wider = late_buckets(record, space, "decode")
    assert [bucket.rows for bucket in wider] == [4, 8, 20]
    assert late_buckets(record, space, "prefill") == space
    second = manager(wider)
    second.warmup()
    with no_compile():
        second(dict(rows=20), torch.ones(20))
    with pytest.raises(LateFileError, match="has the axes rows, expected tokens"):
        late_buckets(record, explicit(["tokens"], [(4,)]), "decode")


def test_late_buckets_keep_the_cost_of_the_space(record):
    record.write_text(
        '{"form": "graphs late work", "version": 1}\n{"kind": "capture", "function": "f[a=9 b=1]", '
        '"name": "f", "need": {"a": 9, "b": 1}}\n'
    )
    space = explicit(["a", "b"], [(4, 2)]).with_cost(lambda bucket: 100 - bucket.a)
    assert dict(late_buckets(record, space, "f").pick(a=1, b=1)) == {"a": 9, "b": 1}


MODEL = """
import torch

def scale(x):
    return x * 2

compiled = torch.compile(scale, backend="eager", dynamic=False)

def example_inputs(bucket):
    return torch.ones(bucket.rows),
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "late_model.py"
    path.write_text(MODEL)
    yield str(path)
    sys.modules.pop("late_model", None)


def record_late_work(model, record):
    # As a program of its own would do, whose module is called __main__.
    module = {"__name__": "__main__"}
    exec(compile(MODEL, model, "exec"), module)
    with no_compile(strict=False, record=record):
        module["compiled"](torch.ones(5))
        first = WarmupManager(module["scale"], explicit(["rows"], [(4,)]),
                              module["example_inputs"], backend="eager", overflow="compile",
                              strict=False)  # fmt: skip
        first.warmup()
        first(dict(rows=6), torch.ones(6))


def test_the_command_takes_the_file(model, record, capsys):
    record_late_work(model, record)
    with CompileWatch() as watch:
        assert run_command(["warmup", f"{model}:compiled", "--late", str(record)]) == 1
    assert watch.compiles == 1
    out = capsys.readouterr().out
    assert "1 warmed up (1 compiles), 2 left" in out and "late_buckets" in out
    (record.parent / "rows.txt").write_text("axes: rows\n[2, 3]\n")
    options = ["--buckets", "rows.txt", "--backend", "eager", "--late", str(record)]
    assert run_command(["warmup", f"{model}:scale", *options]) == 0
    captured = capsys.readouterr()
    assert "0 left" in captured.out and "rows=6" in captured.err


def test_the_command_refuses_bad_files_in_one_line(model, record, capsys):
    record.write_text("rows: 3\n")
    for late in ([], ["--late", str(record)], ["--late", "nowhere"]):
        assert run_command(["warmup", f"{model}:scale", *late]) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1
        assert str(record) not in late or f"{record}:1: " in err
