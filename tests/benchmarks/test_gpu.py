"""The GPU benchmark, run on the fake device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slow import slow_but

pytest.importorskip("transformers", reason="needs the extra hf")
import gpu

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--small --rounds 2 --calls 2 --backends eager --dtype float32"
PARTS = "attention codes replays tiles serving engines providers specialized goals"


@pytest.fixture
def python(tmp_path) -> Path:
    """A Python that has opened the fake device."""
    script = tmp_path / "python"
    opened = "import runpy, sys; from tests.fake_device import open_device; open_device()"
    run = f"{opened}; sys.argv = sys.argv[1:]; sys.path.insert(0, 'benchmarks')"
    run += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{run}" "$@"\n')
    script.chmod(0o755)
    return script


def ran(folder: Path, python: Path, device: str, *parts: str, **names: str) -> Any:
    own = {"PYTHON": str(python), "ARGS": SMALL, "OMP_NUM_THREADS": "1", **names}
    command = ["bash", "benchmarks/gpu_all.sh", str(folder), device, *parts]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, check=False
    )


# None are all, minutes on a busy machine; the tests and the sanitizer of a fake device are skipped.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("parts", slow_but(["serving attention"], ["serving attention", ""]))
def test_one_command_writes_results_for_every_case_and_each_backend_that_works(
    parts, tmp_path, python
):
    folder = tmp_path / "results"
    arguments = SMALL.replace("eager", "nonsense eager")
    process = ran(folder, python, "fake_device", *parts.split(), ARGS=arguments)
    assert process.returncode == 1 and "# failed: nonsense" in process.stdout, process.stderr
    written = json.loads((folder / "gpu_attention.json").read_text())
    assert [row["case"] for row in written["attention"]] == [
        "decode 3 x 32",
        "prefill 2 x 20",
        "chunk 5 of 30",
    ]
    for row in written["attention"]:
        assert {"op", "copy", "sdpa", "gather"} <= set(row["seconds"])
        skipped = {"flex", "sdpa cudnn", "sdpa flash"}
        assert set(row["skipped"]) == skipped, "each with its reason"
    written = json.loads((folder / "gpu_serving.json").read_text())
    (row,) = written["serving"]
    assert written["failed"] == ["nonsense"]
    assert (row["backend"], row["kernel"]) == ("eager", "native") and row["speed"] > 0
    assert row["steps_ahead"] and row["compiles_after_warmup"] == 0
    if not parts:
        assert "# no packed weights: quantised_linear has no kernel for fake" in process.stdout
        assert_all_parts(folder)
    assert "decode 3 x 32" in (folder / "gpu_attention.txt").read_text()
    assert "tokens/s" in (folder / "gpu_serving.txt").read_text()


def assert_all_parts(folder: Path) -> None:
    found = {each: json.loads((folder / f"gpu_{each}.json").read_text()) for each in PARTS.split()}
    assert {"plain", "e4m3"} == set(found["codes"]["codes"][0]["seconds"])
    assert [row["different"] for row in found["replays"]["replays"]] == [0, 0]
    (row,) = found["engines"]["engines"]
    assert row["speeds"]["ours"] > 0 and sum(row["shares"].values()) == pytest.approx(1)
    for part, provider in ("providers", "varlen"), ("specialized", "specialized"):
        rows = found[part]["providers"]
        assert [row["case"].split()[0] for row in rows] == ["prefill", "chunk", "decode"]
        for row in rows:
            assert row["seconds"].keys() == {"copy", "sdpa"}
            for name in ("triton", provider):
                assert "Triton is for CUDA" in row["skipped"][name]
    assert found["goals"]["rows"]["replays differing (0)"] == ["not measured"]


def test_without_the_device_it_is_skipped_with_a_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "xpu", "--json", str(path)])
    gpu.main()
    assert "# skipped: no device 'xpu' here" in capsys.readouterr().out and not path.exists()


def test_each_set_of_parts_ends_within_ten_minutes():
    text = (ROOT / "benchmarks" / "gpu_all.sh").read_text()
    steps = re.findall(r"(?:step gpu_|measure |provide )(\w+) (\d+)", text)
    limits = {name: int(each) for name, each in steps}
    sets = re.findall(r"set\d\) for each in ([\w ]+);", text)
    assert len(limits) == 14 and {*limits} == {*" ".join(sets).split()}
    for parts in sets:
        assert sum(limits[each] + 10 for each in parts.split()) <= 600, parts


def test_the_script_runs_every_folder_with_tests_marked_gpu():
    text = (ROOT / "benchmarks" / "gpu_all.sh").read_text()
    folders = [ROOT / word for word in text.split() if word.startswith("tests/")]
    assert folders and all(folder.exists() for folder in folders)
    for file in (ROOT / "tests").rglob("*.py"):
        if re.search(r"mark\.gpu\b", file.read_text()) and file != Path(__file__):
            assert any(file.is_relative_to(folder) for folder in folders), file


def test_parts_that_fail_or_time_out_are_reported_and_the_others_run(tmp_path):
    process = ran(tmp_path, Path("/bin/false"), "fake_device", "serving", "nonsense", "attention")
    assert process.returncode == 1
    assert re.findall("== gpu_.* failed.*", process.stdout) == [
        "== gpu_serving failed (1)",
        "== gpu_attention failed (1)",
    ]
    assert "specialized, goals, got nonsense" in process.stdout
    slow = tmp_path / "slow"
    orphan = "sleep 60 > /dev/null 2>&1 &"  # which outlives its parent must not keep the pipe
    slow.write_text(f"#!/bin/sh\necho begun; trap 'echo cut off; exit 3' INT; {orphan} wait\n")
    slow.chmod(0o755)
    process = ran(tmp_path, slow, "fake_device", "serving", LIMIT="1")
    assert process.returncode == 1 and "gpu_serving failed" in process.stdout
    assert (tmp_path / "gpu_serving.txt").read_text() == "begun\ncut off\n"
