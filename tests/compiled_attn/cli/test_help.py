"""The help of the command, and the commands that it has of `graphs`."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
import typer

from compiled_attn.cli import main
from compiled_attn.cli.app import app

_HEAVY = "torch", "transformers", "numpy", "compiled_attn.engine.engine"


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as raised:
        main([str(argument) for argument in arguments])
    return raised.value.code


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["plan", "--help"]])
def test_help_imports_nothing_that_takes_seconds(arguments):
    code = f"""
import atexit, sys
import typer

from compiled_attn.cli import main
from compiled_attn.cli.app import app
atexit.register(lambda: print("loaded:", [name for name in {_HEAVY} if name in sys.modules]))
main({arguments})
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: compiled-attn" in shown.stdout and "loaded: []" in shown.stdout


def test_explain_prints_breaks_with_the_users_line(tmp_path, capsys):
    path = tmp_path / "attention_user.py"
    path.write_text("def broken(x):\n    print('side effect')\n    return x * 2\n")
    assert exit_code("explain", f"{path}:broken", "--input", "2") == 1
    assert f"break 0: {path}:2: " in capsys.readouterr().out


def test_explain_has_its_own_help_and_the_errors_of_the_command(capsys):
    assert exit_code("explain", "--help") == 0
    shown = capsys.readouterr().out
    assert "Usage: compiled-attn explain" in shown and "--guards" in shown
    assert exit_code("explain", "missing.py:f", "--input", "2") == 2
    assert capsys.readouterr().err == "compiled-attn: error: no such file: missing.py\n"


def test_cache_looks_at_the_store_of_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("compiled_attn.cli.store.default_store", lambda: tmp_path / "none")
    assert exit_code("cache", "ls") == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"compiled-attn: error: there is no store in {tmp_path / 'none'}")
    assert exit_code("cache", "prune", "--help") == 0
    assert "Usage: compiled-attn cache prune" in capsys.readouterr().out


def test_the_examples_of_the_help_are_commands_that_can_be_given(capsys):
    command = typer.main.get_command(app)
    for name, each in command.commands.items():
        for line in (each.epilog or "").split("\n\n")[1:]:
            program, first, *more = shlex.split(line)
            assert (program, first) == ("compiled-attn", name)
            each.make_context(name, more)  # parses, and runs nothing
