"""The command that measures kernels and linear layers again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiled_attn.cli import tune
from compiled_attn.errors import NativeUnavailable
from compiled_attn.ops import load
from compiled_attn.ops.cpu.kernel_tuning import KernelTuning, TuningResult
from compiled_attn.ops.tuning import Tuning
from tests.compiled_attn.cli.commands import assert_refused


@pytest.fixture
def tuned(tmp_path, monkeypatch) -> Tuning:
    file = tmp_path / "tuning.json"
    file.write_text('{"1 threads, 1 x 1": 3.0}')
    tuned = Tuning(load("reference"), file, lambda ops, weight: weight.shape[0] / 32)
    monkeypatch.setattr("compiled_attn.cli.tune.tuning", lambda: tuned)
    return tuned


@pytest.fixture(autouse=True)
def calibrated(monkeypatch) -> list[Path]:
    """Libraries that were calibrated, for none of which that takes time."""
    libraries: list[Path] = []

    def calibrate(library: Path, isa: str, ops: object) -> TuningResult:
        libraries.append(library)
        return TuningResult(KernelTuning.default("avx512_bf16"), {"decode float32": 0.75})

    monkeypatch.setattr("compiled_attn.cli.tune.calibrate", calibrate)
    return libraries


def test_tune_measures_the_layers_of_the_model_again_and_saves_that(command, model_dir, tuned):
    outcome = command("tune", model_dir)
    assert outcome.code == 0, outcome.err
    saved = json.loads(tuned.file.read_text())
    assert saved == dict(tuned.results) and "1 threads, 1 x 1" not in saved
    assert any(key.endswith("256 x 32") for key in saved)  # the head
    assert "packed over plain" in outcome.out and "saved in" in outcome.out
    shown = [line for line in outcome.out.splitlines() if "256 x 32" in line]
    assert all("8.00" in line for line in shown)
    plain, *others = shown
    assert "float32" not in plain and "packed" in plain
    taken = ["packed" if "float32" in line else "oneDNN" for line in others]
    assert "packed" in taken
    assert all(name in line for line, name in zip(others, taken, strict=True))


@pytest.mark.usefixtures("tuned")
def test_tune_measures_the_kernels_and_prints_the_selected_tuning(command, model_dir, calibrated):
    outcome = command("tune", model_dir)
    if (built := load().build) is None:
        pytest.skip("no native kernel on this machine, so there is nothing to tune")
    assert calibrated == [built.library]
    shown = " ".join(outcome.out.split())
    assert "decode bf16-dot, prefill bf16-dot, linear bf16-dot," in shown
    shown = [line for line in outcome.out.splitlines() if "decode float32" in line]
    assert "0.75" in shown[0]


@pytest.mark.usefixtures("one_thread")
def test_tune_measures_for_as_many_threads_as_are_asked_for(command, model_dir, tuned):
    assert command("tune", model_dir, "--threads", 2).code == 0
    assert all(key.startswith("2 threads, ") for key in json.loads(tuned.file.read_text()))


def test_without_a_native_kernel_there_is_nothing_to_tune(command, monkeypatch):
    def missing() -> Tuning:
        raise NativeUnavailable("expected a C++ compiler, found none: install g++")

    monkeypatch.setattr("compiled_attn.cli.tune.tuning", missing)
    assert_refused(command("tune"), "expected a C++ compiler")


def test_a_model_that_is_not_there_is_one_line(command):
    assert_refused(command("tune", "missing"), "missing", "no such directory")


@pytest.mark.parametrize(
    ("whole", "halves", "taken"),
    [(1.2, 1.5, "in 16 bits"), (1.5, 1.2, "packed"), (0.9, 1.1, "in 16 bits"), (0.8, 0.9, "plain")],
)
def test_what_16_bits_are_taken_over_is_whole_weights_too(whole, halves, taken):
    results = {
        "1 threads, 32 x 64, float32": whole,
        "1 threads, 32 x 64, float32 in halves": halves,
    }
    assert tune._taken("1 threads, 32 x 64, float32 in halves", results) == taken
