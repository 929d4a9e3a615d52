"""`compiled-attn explain` is `python -m graphs explain` with the errors of `compiled-attn`."""

from __future__ import annotations

import inspect

import pytest
import typer

import graphs.cli.explain
from compiled_attn.cli.errors import UserError
from compiled_attn.cli.explain import explain


def test_it_prints_breaks_with_the_users_line(tmp_path, capsys):
    path = tmp_path / "attention_user.py"
    path.write_text("def broken(x):\n    print('side effect')\n    return x * 2\n")
    app = typer.Typer()
    app.command()(explain)
    app.callback()(lambda: None)
    arguments = ["explain", f"{path}:broken", "--input", "2"]
    assert app(args=arguments, standalone_mode=False) == 1
    assert f"break 0: {path}:2: " in capsys.readouterr().out


def test_it_has_the_same_options_and_its_own_kind_of_error():
    assert inspect.signature(explain) == inspect.signature(graphs.cli.explain.explain)
    with pytest.raises(UserError, match=r"no such file: missing\.py"):
        explain("missing.py:f", input=["2"])
