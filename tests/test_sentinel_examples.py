"""The sentinel around other libraries: each example names a late compile and its cause."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VLLM = os.environ.get("VLLM_PYTHON") or (sys.executable if find_spec("vllm") else "")


def run_example(name, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


def test_a_longer_prompt_recompiles_a_layer_of_transformers(monkeypatch, capsys):
    pytest.importorskip("transformers", reason="needs the extra hf")
    out = run_example("sentinel_generate.py", monkeypatch, capsys)
    assert "prompt of 8: 0 compiles" in out
    assert "prompt of 11: recompile of " in out
    assert "size mismatch at index 1. expected 8, actual 11" in out
    assert "remedy: pad it to a captured shape" in out


def test_two_images_recompile_the_denoiser_of_diffusers(monkeypatch, capsys):
    pytest.importorskip("diffusers", reason="needs diffusers, which no extra of ours installs")
    out = run_example("sentinel_diffusers.py", monkeypatch, capsys)
    assert "one image, more steps: 0 compiles" in out
    assert "recompile of UNet2DModel.forward" in out
    assert "tensor 'sample' size mismatch at index 0. expected 1, actual 2" in out


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="needs vLLM: install it, or name its Python in VLLM_PYTHON")
def test_the_first_logprobs_compile_late_inside_vllm(tmp_path):
    out = subprocess.run(
        [VLLM, str(ROOT / "examples" / "sentinel_vllm.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    ).stdout
    assert "plain requests: 0 compiles" in out
    assert "compile of batched_count_greater_than" in out and "logprobs.py" in out
    assert "after one such request: 0 compiles" in out
