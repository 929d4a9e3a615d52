"""The warm-up script for a module of one's own, as a script and from the shell."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from graphs import from_file
from graphs.cli.app import run_command

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "warmup_your_module.py"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *arguments])
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return exited.value.code


def test_the_script_warms_up_serves_and_reports(monkeypatch, capsys, tmp_path):
    arguments = ["--backend", "aot_eager", "--report", str(tmp_path / "report")]
    assert run(monkeypatch, *arguments) == 0
    out = capsys.readouterr().out
    assert "7 of 7 buckets captured" in out
    assert "7 clips of up to 310 frames denoised" in out
    assert "0 compiles while serving; never used: [Bucket(clips=1, frames=400)" in out
    page = (tmp_path / "report" / "report.html").read_text()
    assert "clips=8 frames=400: 1 hits" in page and "clips=1 frames=400: never hit" in page


def test_its_bucket_file_and_module_work_from_the_shell(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    buckets = SCRIPT.with_suffix(".txt")
    target = f"{SCRIPT}:Denoiser"
    assert run_command(["explain", target, "--bucket", "clips=2,frames=400", "--no-guards"]) == 0
    assert "audio" not in capsys.readouterr().err
    assert run_command(["warmup", target, "--buckets", str(buckets), "--backend", "eager"]) == 0
    assert f"{len(from_file(buckets))} of 7 buckets captured" in capsys.readouterr().out
    sys.modules.pop("warmup_your_module", None)
