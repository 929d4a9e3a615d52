"""Caches are in the platform's cache folder, or where XDG_CACHE_HOME says."""

from __future__ import annotations

import os
import re
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
def test_without_a_variable_the_cache_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in (None, "", "relative/cache"):  # the specification has relative paths ignored
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder("compiled-attn") == tmp_path / ".cache" / "compiled-attn"
    assert not (tmp_path / ".cache").exists()  # created on first use


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


# Inductor, OpenMP and vLLM take some settings from the environment only.
_READERS = re.compile(
    r"/cli/|replicas|/contrib/|/integrations/|pytest_plugin|waiting|graph_store|cache_folder|inductor_cache"
    r"|testing/fuzz/vllm_cpu"  # hands it to a process
)


def test_only_commands_and_the_cache_folder_read_the_environment():
    """No global state: rule 7 of the architecture."""
    readers = [
        str(path)
        for package in ("graphs", "compiled_attn")
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"[^#`]*(os\.environ|getenv)", line) and not line.lstrip().startswith("...")
    ]
    assert [path for path in readers if not _READERS.search(path)] == []
