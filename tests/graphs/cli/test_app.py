"""`python -m graphs` and its commands, on a module of a user."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphs.cli
from graphs.cli.app import run_command
from graphs.installation import install_command

ROOT = Path(__file__).resolve().parents[3]
WARMUP = ("--buckets", "rows.txt", "--backend", "eager")
MODEL = """
import torch

def full(x):
    return x * 2 + 1

def broken(x):
    x = x + 1
    if x.sum().item() > 0:
        x = x * 2
    return x

def raises(x):
    raise ValueError("not today")

def picky(x):
    if x.shape[0] == 2:
        raise ValueError("no twos")
    return x + 1

def example_inputs(bucket):
    return torch.ones(bucket.rows),

def three():
    return torch.ones(3)
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "user_model.py"
    path.write_text(MODEL)
    (tmp_path / "rows.txt").write_text("axes: rows\n[2, 4]\n")
    yield str(path)
    sys.modules.pop("user_model", None)


def test_a_warmup_shares_one_compile_and_the_next_one_loads_it(model, tmp_path, fresh_compiler):
    options = ("--buckets", "rows.txt", "--symbolic", "--store", "graphs", "--json", "report.json")
    for compiles in (1, 0):
        torch._dynamo.reset()
        assert run_command(["warmup", f"{model}:full", *options]) == 0
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["compiles"] == compiles and len(report["buckets"]) == 2
        assert {each["is_loaded"] for each in report["buckets"]} == {not compiles}


def test_a_store_needs_a_backend_that_can_be_stored(model, capsys):
    options = ["warmup", f"{model}:full", *WARMUP, "--store", "graphs"]
    assert run_command(options) == 2
    assert "--store works with --backend inductor" in capsys.readouterr().err
    assert run_command(["warmup", f"{model}:full", *WARMUP, "--symbolic"]) == 2
    assert "captures at fixed sizes only" in capsys.readouterr().err


def test_explain_prints_graphs_and_guards_of_a_full_graph(model, capsys):
    assert run_command(["explain", f"{model}:full", "--input", "2x8:float64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("full: 1 graph(s), 0 break(s), ")
    assert "operator.mul" in out and "x is float64[2, 8] on cpu" in out


def test_explain_prints_each_break_with_the_users_line_and_ends_with_1(model, capsys):
    arguments = ["--inputs", "three", "--no-graphs", "--no-guards"]
    assert run_command(["explain", f"{model}:broken", *arguments]) == 1
    captured = capsys.readouterr()
    head, found, code, features = captured.out.splitlines()
    assert head.startswith("broken: 2 graph(s), 1 break(s), ")
    assert found.startswith(f"break 0: {model}:9: Unsupported Tensor.item()")
    assert code.strip() == "if x.sum().item() > 0:"
    assert features.startswith("torch ") and "direct_call" in features
    assert "Graph break" not in captured.err


def test_explain_leaves_the_log_of_dynamo_as_it_was(model):
    log = logging.getLogger("torch._dynamo")
    before = log.level
    assert run_command(["explain", f"{model}:raises", "--input", "2"]) == 2
    assert log.level == before


def test_explain_takes_inputs_from_the_module_for_a_bucket(model, capsys):
    assert run_command(["explain", f"{model}:full", "--bucket", "rows=5"]) == 0
    assert "x is float32[5] on cpu" in capsys.readouterr().out


@pytest.mark.parametrize(("flag", "guarded"), [("--grad", "True"), ("--no-grad", "False")])
def test_explain_traces_under_the_chosen_grad_mode(model, flag, guarded, capsys):
    (Path(model).parent / "user_model.py").write_text(
        "import torch\ndef shows(x):\n    return x * (2 if torch.is_grad_enabled() else 3)\n"
    )
    assert run_command(["explain", f"{model}:shows", "--input", "1", flag]) == 0
    assert f"(%l_inputs_0_, {2 if guarded == 'True' else 3})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "{}:full"], "example_inputs takes a bucket"),
        (["explain", "{}:full", "--input", "2", "--bucket", "rows=2"], "both given"),
        (
            ["explain", "{}:raises", "--input", "2"],
            "failed: ValueError: not today .*user_model.py:14",
        ),
        (["explain", "{}:full", "--inputs", "four"], "has no function four"),
        (["explain"], "Missing (argument|parameter)"),
        (["explode"], "No such command"),
        (["warmup", "{}:full"], "expected --buckets FILE, --late FILE or both"),
        (["warmup", "{}:full", "--buckets", "none.txt"], "none.txt: not readable"),
        (["warmup", "{}:full", *WARMUP, "--backend", "x"], "--backend x cannot work"),
        (["warmup", "{}:full", *WARMUP, "--order", "x"], "order"),
        (["warmup", "{}:full", *WARMUP, "--budget-seconds", "-1"], "budget_seconds"),
        (["explain", "{}:full", "--input", "9999999999x9999999999"], "takes .* bytes, but there"),
        (["explain", "{}:full", "--input", "99999999999999999999x0"], "cannot be made"),
        (["explain", "{}:full", "--input", "2:quint8"], "cannot be made"),
        (["warmup", "{}:full", *WARMUP, "--journal", "."], "directory"),
        (["warmup", "{}:full", *WARMUP, "--json", "."], "directory"),
        (["warmup", "{}:full", *WARMUP, "--report", "{}"], "exists"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model, arguments, message, capsys):
    assert run_command([argument.format(model) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphs: error: ") and error.count("\n") == 1
    assert re.search(message, error), error


def test_a_library_that_the_report_lacks_is_named_before_anything_is_captured(
    model, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_command(["warmup", f"{model}:full", *WARMUP, "--report", "page"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        f"graphs: error: the report needs matplotlib: {install_command('report')}\n"
    )
    assert captured.out == "" and not Path("page").exists()


STOPS = """
import sys
import torch

class Stop(BaseException):
    pass

class Net(torch.nn.Module):
    def __init__(self):
        raise Stop("not now")

def leaves(x):
    sys.exit(3)

def example_inputs(bucket):
    return (torch.ones(bucket.rows),)

def no_inputs(bucket):
    sys.exit("bye")
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["explain", "{}:leaves", "--input", "2"],
            r"running .* SystemExit: 3 \(.*user_model.py:13",
        ),
        (["explain", "{}:Net", "--input", "2"], r"calling .* Stop: not now \(.*user_model.py:10"),
        (
            ["explain", "{}:leaves", "--inputs", "no_inputs", "--bucket", "rows=1"],
            "SystemExit: bye",
        ),
        (["warmup", "{}:leaves", *WARMUP], "SystemExit: 3"),
    ],
)
def test_a_users_module_cannot_end_the_command_with_its_own_exit(model, arguments, message, capsys):
    Path(model).write_text(STOPS)
    assert run_command([argument.format(model) for argument in arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("graphs: error: ") and re.search(message, error), error


def test_bucket_inputs_that_exit_fail_their_bucket_alone(model, capsys):
    Path(model).write_text(STOPS)
    assert run_command(["warmup", f"{model}:leaves", *WARMUP, "--inputs", "no_inputs"]) == 1
    captured = capsys.readouterr()
    assert "SystemExit: bye" in captured.out
    assert "0 of 2 captured; first cause" in captured.err


def test_warmup_captures_every_bucket_and_writes_results_options_and_machine(
    model, tmp_path, capsys
):
    outputs = ["--json", "out.json", "--report", "page"]
    assert run_command(["warmup", f"{model}:full", *WARMUP, *outputs]) == 0
    captured = capsys.readouterr()
    assert "warmup 2/2 rows=2: " in captured.err
    assert captured.out.startswith("2 of 2 buckets captured")
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["status"] for row in result["buckets"]] == ["captured"] * 2
    report = json.loads((tmp_path / "page" / "report.json").read_text())
    assert report["options"]["backend"] == "eager" and report["options"]["buckets"] == "rows.txt"
    assert report["options"]["target"].endswith(":full") and report["options"]["journal"] is None
    assert report["threads"] and report["versions"]["python"]
    page = (tmp_path / "page" / "report.html").read_text()
    for text in (f"Warmup of {model}:full", "rows=4", report["machine"]["cpu"], report["date"]):
        assert text in page


def test_a_bucket_that_cannot_be_captured_ends_the_warmup_command_with_1(model, capsys):
    assert run_command(["warmup", f"{model}:picky", *WARMUP]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 buckets captured" in out and "rows=2: failed: ValueError: no twos" in out


def test_an_interrupted_warmup_prints_its_results_and_ends_with_130(model, capsys):
    Path(model).write_text(
        MODEL
        + "\ndef stops(x):\n    if len(x) == 2:\n        raise KeyboardInterrupt\n    return x\n"
    )
    assert run_command(["warmup", f"{model}:stops", *WARMUP]) == 130
    captured = capsys.readouterr()
    assert "interrupted; the results so far:" in captured.err
    assert captured.out.startswith("1 of 1 buckets captured")


def test_without_typer_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as caught:
        graphs.cli.main(["explain"])
    assert caught.value.code == 2
    assert install_command("cli") in capsys.readouterr().err


def test_python_m_graphs_is_the_command(model):
    done = subprocess.run(
        [sys.executable, "-m", "graphs", "explain", "none.py:f"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("graphs: error: ")


def test_help_does_not_wait_for_torch():
    code = "import sys, graphs.cli.app; print({'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
