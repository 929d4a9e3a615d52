"""The benchmark for GPUs, on the stand-in device: what it does, not how fast."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
ROOT = Path(__file__).resolve().parents[2]
SMALL = "--small --rounds 2 --calls 2 --backends eager --dtype float32"


@pytest.fixture
def python(tmp_path) -> Path:
    """A Python in which the stand-in device is open."""
    script = tmp_path / "python"
    opened = "import runpy, sys; from tests.stand_in import open_device; open_device()"
    run = f"{opened}; sys.argv = sys.argv[1:]; sys.path.insert(0, 'benchmarks')"
    run += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{run}" "$@"\n')
    script.chmod(0o755)
    return script


def ran(folder: Path, python: Path, device: str) -> subprocess.CompletedProcess[str]:
    names = {"PYTHON": str(python), "ARGS": SMALL, "OMP_NUM_THREADS": "1"}
    command = ["bash", "benchmarks/gpu_all.sh", str(folder), device]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | names, capture_output=True, text=True, check=False
    )


def test_one_command_writes_the_figures_of_every_case_and_backend(tmp_path, python):
    folder = tmp_path / "results"
    process = ran(folder, python, "stand_in")
    assert process.returncode == 0, process.stdout + process.stderr
    told = json.loads((folder / "gpu.json").read_text())
    assert [row["case"] for row in told["attention"]] == [
        "decode 3 x 32",
        "prefill 2 x 20",
        "chunk 5 of 30",
    ]
    for row in told["attention"]:
        assert {"op", "copy", "sdpa", "gather"} <= set(row["seconds"])
        assert set(row["skipped"]) == {"varlen", "flex"}, "each with its reason"
    ((backend, speed, _, kernel),) = told["serving"]
    assert (backend, kernel) == ("eager", "native") and speed > 0
    text = (folder / "gpu.txt").read_text()
    assert "decode 3 x 32" in text and "tokens/s" in text


def test_without_the_device_it_is_skipped_with_a_line(tmp_path, python):
    process = ran(tmp_path, python, "xpu")
    assert process.returncode == 0
    assert "# skipped: no device 'xpu' here" in process.stdout


def test_the_script_runs_the_folders_of_all_tests_for_a_gpu():
    text = (ROOT / "benchmarks" / "gpu_all.sh").read_text()
    folders = [ROOT / word for word in text.split() if word.startswith("tests/")]
    assert folders and all(folder.is_dir() for folder in folders)
    for file in (ROOT / "tests").rglob("*.py"):
        if re.search(r"mark\.gpu\b", file.read_text()) and file != Path(__file__):
            assert any(file.is_relative_to(folder) for folder in folders), file


def test_a_step_that_fails_is_told_and_the_exit_code_says_so(tmp_path):
    process = ran(tmp_path, Path("/bin/false"), "stand_in")
    assert process.returncode == 1 and "== gpu failed (1)" in process.stdout
