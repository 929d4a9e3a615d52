"""Benchmarks of `make bench`: one without its input is skipped, and the others still run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_without_its_trace_the_engines_benchmark_is_skipped_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script, trace = BENCHMARKS / "engine.py", tmp_path / "none.jsonl"
    if not script.exists():
        pytest.skip(f"there is no {script}")
    monkeypatch.setattr(sys, "argv", [str(script), "--trace", str(trace)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"# {trace}: skipped, no such file")
