"""The command line: its exit codes, files and one-line errors."""

from __future__ import annotations

import json
import runpy
import sys
from importlib.util import find_spec

import pytest

from compiled_attn.testing.kit.command import run_command
from tests.compiled_attn.testing.kit.test_script import KERNELS, _exit_code

OP = f"{KERNELS}:Kernel"
FEW = ["-k", "decode", "-k", "window"]


def test_an_op_that_passes_ends_with_0_and_one_that_fails_with_1(capsys, tmp_path):
    assert run_command([f"{OP}()", *FEW]) == 0
    assert "2 of 2 cases passed" in capsys.readouterr().out
    files = [tmp_path / name for name in ("report.json", "report.html", "case.py")]
    options = zip(("--json", "--html", "--script"), map(str, files), strict=True)
    module = tmp_path / "broken.py"
    module.write_text(
        "from tests.compiled_attn.testing.kit.kernels import Kernel\n"
        "my_op = Kernel('window off by one')\n"
    )
    assert run_command([f"{module}:my_op", *FEW, *(x for pair in options for x in pair)]) == 1
    assert f"python {files[2]}" in capsys.readouterr().out
    assert json.loads(files[0].read_text())["ok"] is False
    assert "<table>" in files[1].read_text()
    assert _exit_code(files[2].read_text()) == 1


def test_options_replace_what_is_declared(capsys):
    sizes = ["--head-dims", "8,24", "--block-sizes", "2", "--groups", "3", "--dtypes", "bfloat16"]
    assert run_command([f"{OP}()", *FEW, "--claims", "softcap", *sizes]) == 0
    out = capsys.readouterr().out
    assert "dtypes bfloat16, head dims 8 24, block sizes 2, groups 3, on cpu" in out
    assert "1 of 1 cases passed" in out


def test_the_list_shows_each_case_with_its_guarantee(capsys):
    assert run_command(["--list", "-k", "softcap_alibi"]) == 0
    line = "softcap_alibi: scores are capped before ALiBi is added (needs alibi, softcap)\n"
    assert capsys.readouterr().out == line


BAD = {
    "no op": ([], "expected MODULE:OP"),
    "no name": (["mykernel"], "expected MODULE:NAME"),
    "no module": (["no_such_module:op"], "no module named no_such_module"),
    "no file": (["no_such_file.py:op"], "no such file: no_such_file.py"),
    "no such op": ([f"{KERNELS}:Kernle"], "has no Kernle; it has Kernel"),
    "no callable": ([f"{KERNELS}:BUGS"], "to be callable, got a dict"),
    "another signature": ([f"{KERNELS}:pairwise"], "expected the signature of one of flash"),
    "an unknown claim": ([f"{OP}()", "--claims", "windw"], "unknown capability 'windw'"),
    "no claim of the interface": ([f"{OP}()", "--claims", "append"], "unknown capability 'append'"),
    "an unknown dtype": ([f"{OP}()", "--dtypes", "int3"], "dtypes: expected some of float16"),
    "no number": ([f"{OP}()", "--head-dims", "a"], "--head-dims: expected numbers"),
    "an unknown interface": ([f"{OP}()", "--interface", "x"], "interface: expected one of flash"),
    "no interface": ([f"{OP}()", "--interface", f"{OP}"], "interface: expected a subclass of"),
    "no device": ([f"{OP}()", "--device", "cuda:99"], "device 'cuda:99' is not available"),
    "a device without memory": ([f"{OP}()", "--device", "meta"], "device 'meta' is not available"),
    "no case": ([f"{OP}()", "-k", "xyz"], "no case has 'xyz'"),
    "no case that is claimed": ([f"{OP}()", "--claims", "softcap", "-k", "window"], "no case ran"),
    "no folder": ([f"{OP}()", "--json", "/no/folder/x.json"], "cannot write /no/folder/x.json"),
    "no option": ([f"{OP}()", "--nothing"], "--nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_2(name, capsys):
    arguments, message = BAD[name]
    assert run_command(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("compiled_attn.testing: error: ") and error.count("\n") == 1
    assert message in error


def test_a_module_that_fails_to_import_is_one_line(tmp_path, capsys):
    path = tmp_path / "failing.py"
    path.write_text("import torch\nraise RuntimeError('not today')\n")
    assert run_command([f"{path}:op"]) == 2
    error = capsys.readouterr().err
    assert "not today" in error and error.count("\n") == 1


def test_the_module_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["testing", "--list", "-k", "decode"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(find_spec("compiled_attn.testing.__main__").origin, run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("decode: ")
