"""Caches lie where the platform keeps them, and where XDG_CACHE_HOME says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphs.store import StoreError
from graphs.store.cache_folder import cache_folder

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["platformdirs", "without"])
def installed(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "platformdirs", None)
    else:
        pytest.importorskip("platformdirs")


@pytest.mark.usefixtures("installed")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the convention of Linux")
def test_without_a_variable_nobodys_cache_moves(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for told in (None, "", "relative/cache"):  # the specification has relative paths ignored
        if told is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", told)
        assert cache_folder("compiled-attn") == tmp_path / ".cache" / "compiled-attn"
    assert not (tmp_path / ".cache").exists()  # only who needs it makes it


@pytest.mark.usefixtures("installed")
def test_the_variable_is_followed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("graphs") == tmp_path / "xdg" / "graphs"


@pytest.mark.usefixtures("installed")
def test_a_user_without_a_home_gets_no_folder_in_the_working_directory(monkeypatch, tmp_path):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(StoreError, match=r"home directory\. Give a folder, or set XDG_CACHE_HOME"):
        cache_folder("graphs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("graphs") == tmp_path / "graphs"


def test_the_platform_is_asked_where_it_can_be(monkeypatch, tmp_path):
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
        platformdirs, "user_cache_path", lambda name, appauthor: tmp_path / "Library" / name
    )
    assert cache_folder("graphs") == tmp_path / "Library" / "graphs"


ASK = """
from compiled_attn.cli.store import default_store
from compiled_attn.ops import default_folder
from graphs.cli.app import run_command
print(default_store(), default_folder())
raise SystemExit(run_command(["cache", "ls"]))
"""


def test_store_kernels_and_both_commands_follow_the_variable(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2 and f"no store in {tmp_path}/graphs" in done.stderr
    assert done.stdout.split() == [
        f"{tmp_path}/compiled-attn",
        f"{tmp_path}/compiled-attn-kernels",
    ]


def test_only_this_file_and_the_commands_ask_the_environment():
    """The cores are told; see rule 7 of the architecture."""
    asking = {
        path.relative_to(ROOT).as_posix()
        for package in ("graphs", "compiled_attn")
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if ("os.environ" in line or "getenv" in line) and not line.lstrip().startswith(("#", "..."))
    }
    commands = {"compiled_attn/cli/replicas.py"}
    commands.add("compiled_attn/waiting.py")  # OpenMP reads its settings nowhere else
    commands.add("compiled_attn/engine/graph_store.py")  # inductor's cache is told in no other way
    commands.add("compiled_attn/pytest_plugin.py")
    commands.add("compiled_attn/contrib/vllm/__init__.py")  # vLLM calls it without arguments
    allowed = {"graphs/store/cache_folder.py", *commands}
    mentioned = {"graphs/store/inductor_cache.py", "graphs/store/values.py"}  # in comments
    assert asking - mentioned == allowed
