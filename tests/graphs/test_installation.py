"""The command that error messages name: it works where the code is."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

from graphs import installation
from graphs.installation import install_command

ROOT = Path(__file__).resolve().parents[2]


def test_from_a_checkout_the_command_names_the_checkout():
    *_, option, what = shlex.split(install_command("serve", "gguf"))
    assert (option, what) == ("-e", f"{ROOT}[serve,gguf]")


def test_a_path_with_a_space_is_quoted(monkeypatch, tmp_path):
    folder = tmp_path / "my code"
    (folder / "graphs").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "__file__", str(folder / "graphs" / "installation.py"))
    assert shlex.split(install_command("cli"))[-1] == f"{folder}[cli]"


def test_an_installed_copy_says_that_it_takes_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "graphs" / "installation.py"))
    assert install_command("cli") == "pip install '.[cli]' (in a checkout of compiled-attn)"


def test_a_release_changes_one_constant(monkeypatch):
    monkeypatch.setattr(installation, "_PUBLISHED", True)
    assert install_command("cli", "hf") == "pip install 'compiled-attn[cli,hf]'"
    assert install_command() == "pip install compiled-attn"


def test_every_extra_that_a_message_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    sources = [p for each in ("graphs", "compiled_attn") for p in (ROOT / each).rglob("*.py")]
    calls = [
        arguments.split(")")[0]
        for path in sources
        for arguments in path.read_text().split("install_command(")[1:]
    ]
    named = {each.strip("\"' ") for call in calls for each in call.split(",") if "*" not in call}
    assert named and named <= extras.keys()
