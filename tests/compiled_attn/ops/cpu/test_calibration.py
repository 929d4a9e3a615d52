"""Calibration: the fastest tuning is applied, saved and reported, and noise does not decide."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_attn.ops.cpu import calibration, kernel_tuning
from compiled_attn.ops.cpu.calibration import calibrate, load_or_calibrate, load_or_calibrate_16bit
from compiled_attn.ops.cpu.kernel_tuning import KernelTuning, TuningResult
from compiled_attn.ops.cpu.libraries import kernel_tuning_file

ISA = "amx_bf16"
DEFAULT = KernelTuning.default(ISA)


class Machine:
    """Fake kernels whose time is a function of the tuning."""

    def __init__(self, seconds: Callable[[KernelTuning, str], float]) -> None:
        self.seconds, self.applied, self.now = seconds, DEFAULT, 0.0
        self.measured = 0

    def apply(self, library: Path, tuning: KernelTuning) -> None:
        self.applied = tuning

    def thread_time(self) -> float:
        return self.now

    def paged_attention(self, query: torch.Tensor, *args: object) -> None:
        self.measured += 1
        is_decode = query.shape[0] == calibration._REQUESTS
        self.now += self.seconds(self.applied, "decode" if is_decode else "prefill")

    def packed_linear(self, input: torch.Tensor, weight: torch.Tensor) -> None:
        name = {count: each for each, count in calibration._PREFETCH_ROWS.items()}
        others = "bf16-widen" if weight.dtype is torch.int16 else "linear"
        kind = name.get(input.shape[0], others)
        self.now += self.seconds(self.applied, kind)


@pytest.fixture
def on(monkeypatch) -> Callable[[Callable[[KernelTuning, str], float]], Machine]:
    def made(seconds: Callable[[KernelTuning, str], float]) -> Machine:
        machine = Machine(seconds)
        monkeypatch.setattr(kernel_tuning, "apply", machine.apply)
        monkeypatch.setattr(calibration.time, "thread_time", machine.thread_time)
        monkeypatch.setattr(calibration, "_PAGES", 1)
        return machine

    return made


def _of_an_intel(tuning: KernelTuning, kind: str) -> float:
    """Dot products at half the rate, and memory that likes to be asked long before."""
    if kind == "decode":
        return (0.7 if tuning.decode == "float32" else 1.0) * 32 / (32 + tuning.prefetch_kib)
    if kind in calibration._PREFETCH_ROWS:
        return 1.0 if getattr(tuning, kind) == "L2" else 1.1
    if kind == "bf16-widen":
        return 50.0 if tuning.linear_bf16_weights == "amx" else 100.0
    products = tuning.prefill if kind == "prefill" else tuning.linear
    return {"amx": 20.0, "bf16-dot": 140.0, "float32": 100.0}[products]


def test_16bit_caches_of_a_divided_library_are_measured_when_they_are_needed(on, tmp_path):
    machine, whole = on(_of_an_intel), tmp_path / "whole.so"
    expected = load_or_calibrate(whole, ISA, machine).tuning
    library = tmp_path / "library.so"
    others = load_or_calibrate(library, ISA, machine, divided=True)
    guess = {name: getattr(DEFAULT, name) for name in ("decode", "prefill")}
    assert others.tuning == replace(expected, **guess) == machine.applied
    for _ in range(2):
        result = load_or_calibrate_16bit(library, ISA, machine, others)
        assert result.tuning == expected == machine.applied
        assert {*others.ratios} < {*result.ratios}
        machine.seconds = lambda *_: pytest.fail("measures again")


def test_each_kind_of_work_gets_its_fastest_tuning(on, tmp_path):
    machine = on(_of_an_intel)
    result = load_or_calibrate(tmp_path / "library.so", ISA, machine)
    fastest = KernelTuning("float32", "amx", "amx", "L2", 128, "L2", "L2", "amx")
    assert result.tuning == fastest == machine.applied
    without_tiles = load_or_calibrate(tmp_path / "other.so", "avx512_bf16", on(_of_an_intel))
    expected = KernelTuning("float32", "float32", "float32", "L2", 128, "L2", "L2")
    assert without_tiles.tuning == expected
    assert result.ratios["decode float32"] == pytest.approx(1 / 0.7, abs=1e-3)
    assert result.ratios["prefill bf16-dot"] == pytest.approx(0.2 / 1.4, abs=1e-3)


def test_a_gain_that_may_be_chance_is_none(on, tmp_path):
    def nearly(tuning: KernelTuning, kind: str) -> float:
        is_prefetch = kind in calibration._PREFETCH_ROWS
        return 1.0 if is_prefetch or tuning == DEFAULT else 0.97

    assert load_or_calibrate(tmp_path / "library.so", ISA, on(nearly)).tuning == DEFAULT


@pytest.mark.parametrize("name", ["linear_prefetch", "linear_prefetch_once"])
@pytest.mark.parametrize(("gain", "taken"), [(1.01, "L1"), (1.04, "L2")])
def test_a_small_gain_of_weights_counts_as_it_is_measured_more_often(
    on, tmp_path, name, gain, taken
):
    def nearly(tuning: KernelTuning, kind: str) -> float:
        return 1 / gain if kind == name and getattr(tuning, name) == "L2" else 1.0

    result = load_or_calibrate(tmp_path / "library.so", ISA, on(nearly))
    assert result.tuning == replace(DEFAULT, **{name: taken})
    assert result.ratios[f"{name} L2"] == pytest.approx(gain, abs=1e-3)


def test_a_gain_that_is_not_found_twice_is_none(on, tmp_path):
    seen: list[KernelTuning] = []

    def once(tuning: KernelTuning, kind: str) -> float:
        if tuning.decode != "float32":
            return 1.0
        seen.append(tuning)
        return 0.1 if len(seen) <= calibration._ROUNDS else 1.0

    assert load_or_calibrate(tmp_path / "library.so", ISA, on(once)).tuning.decode == "bf16-dot"


def test_it_is_measured_once_for_all_processes_and_again_when_asked_for(on, tmp_path):
    library = tmp_path / "library.so"
    first = load_or_calibrate(library, ISA, on(_of_an_intel))
    other = on(lambda tuning, kind: 1.0)
    assert load_or_calibrate(library, ISA, other) == first and not other.measured
    assert other.applied == first.tuning
    again = calibrate(library, ISA, other)
    assert again.tuning == DEFAULT == other.applied
    assert kernel_tuning.read(library, ISA) == again


def test_those_who_come_at_once_wait_for_one(on, tmp_path):
    machine = on(_of_an_intel)
    alone = on(_of_an_intel)
    load_or_calibrate(tmp_path / "alone.so", ISA, alone)
    machine = on(_of_an_intel)
    with ThreadPoolExecutor(4) as pool:
        library = tmp_path / "library.so"
        every = [*pool.map(lambda _: load_or_calibrate(library, ISA, machine), range(4))]
    assert every == every[:1] * 4 and machine.measured == alone.measured


def test_a_folder_that_cannot_be_written_serves_with_the_best_guess(on, tmp_path):
    machine = on(_of_an_intel)
    library = tmp_path / "none" / "library.so"
    assert load_or_calibrate(library, ISA, machine) == TuningResult(DEFAULT)
    assert machine.applied == DEFAULT and not machine.measured


def test_an_interrupt_leaves_nothing_behind_but_the_next_start_measures(on, tmp_path):
    def interrupted(tuning: KernelTuning, kind: str) -> float:
        raise KeyboardInterrupt

    library, threads = tmp_path / "library.so", torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        load_or_calibrate(library, ISA, on(interrupted))
    assert torch.get_num_threads() == threads and not kernel_tuning_file(library).exists()
    assert load_or_calibrate(library, ISA, on(_of_an_intel)).tuning.decode == "float32"


def test_within_a_trace_it_measures_tensors_that_have_data(on, tmp_path):
    machine, state = on(_of_an_intel), torch.random.get_rng_state()
    with FakeTensorMode(), torch.device("meta"):
        load_or_calibrate(tmp_path / "library.so", ISA, machine)
    assert machine.measured and torch.equal(torch.random.get_rng_state(), state)


def test_the_kernels_of_this_machine_are_calibrated_at_their_first_use(ops):
    assert ops.tuning is not None and ops.tuning.tuning.fits(ops.isa)
    assert os.access(ops.build.library.parent, os.W_OK)
    assert ops.tuning.ratios and kernel_tuning.read(ops.build.library, ops.isa) is not None
