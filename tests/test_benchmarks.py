"""`make bench` skips a benchmark without its input."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_the_engine_benchmark_without_its_trace_is_skipped(monkeypatch, capsys, tmp_path):
    script, trace = BENCHMARKS / "engine.py", tmp_path / "none.jsonl"
    if not script.exists():
        pytest.skip(f"there is no {script}")
    monkeypatch.setattr(sys, "argv", [str(script), "--trace", str(trace)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"# {trace}: skipped, no such file")
