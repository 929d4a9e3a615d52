"""The calibration: the fastest form is taken, kept and told, and chance does not choose."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_attn.ops import NativeUnavailable, load
from compiled_attn.ops.cpu import calibration
from compiled_attn.ops.cpu.build import find_compiler
from compiled_attn.ops.cpu.calibration import calibrate, settle
from compiled_attn.ops.cpu.forms import Chosen, Forms, kept
from compiled_attn.ops.cpu.libraries import forms_of

ISA = "amx_bf16"


class Machine:
    """Kernels that take as long as is said of the form that they work in."""

    def __init__(self, seconds: Callable[[Forms, str], float]) -> None:
        self.seconds, self.taken, self.now = seconds, Forms.of(ISA), 0.0
        self.measured = 0

    def take(self, library: Path, forms: Forms) -> None:
        self.taken = forms

    def thread_time(self) -> float:
        return self.now

    def paged_attention(self, query: torch.Tensor, *args: object) -> None:
        self.measured += 1
        few = query.shape[0] == calibration._REQUESTS
        self.now += self.seconds(self.taken, "few" if few else "many")

    def packed_linear(self, input: torch.Tensor, weight: torch.Tensor) -> None:
        asking = {count: each for each, count in calibration._ROWS_OF_ASKING.items()}
        others = "halves" if weight.dtype is torch.int16 else "linear"
        kind = asking.get(input.shape[0], others)
        self.now += self.seconds(self.taken, kind)


@pytest.fixture
def on(monkeypatch) -> Callable[[Callable[[Forms, str], float]], Machine]:
    def made(seconds: Callable[[Forms, str], float]) -> Machine:
        machine = Machine(seconds)
        monkeypatch.setattr(calibration, "take", machine.take)
        monkeypatch.setattr(calibration.time, "thread_time", machine.thread_time)
        monkeypatch.setattr(calibration, "_PAGES", 1)
        return machine

    return made


def _of_an_intel(forms: Forms, kind: str) -> float:
    """Dot products at half the rate, and memory that likes to be asked long before."""
    if kind == "few":
        return (0.7 if forms.few_rows == "floats" else 1.0) * 32 / (32 + forms.ahead_kib)
    if kind in calibration._ROWS_OF_ASKING:
        return 1.0 if getattr(forms, kind) == "L2" else 1.1
    if kind == "halves":
        return 50.0 if forms.linear_halves == "tiles" else 100.0
    products = forms.many_rows if kind == "many" else forms.linear
    return {"tiles": 20.0, "pairs": 140.0, "floats": 100.0}[products]


def test_each_kind_of_work_gets_its_fastest_form(on, tmp_path):
    machine = on(_of_an_intel)
    chosen = settle(tmp_path / "library.so", ISA, machine)
    fastest = Forms("floats", "tiles", "tiles", "L2", 128, "L2", "L2", "tiles")
    assert chosen.forms == fastest == machine.taken
    assert chosen.ratios["few_rows floats"] == pytest.approx(1 / 0.7, abs=1e-3)
    assert chosen.ratios["many_rows pairs"] == pytest.approx(0.2 / 1.4, abs=1e-3)


def test_where_dot_products_are_slow_and_no_tiles_are_there_float32_serves(on, tmp_path):
    chosen = settle(tmp_path / "library.so", "avx512_bf16", on(_of_an_intel))
    assert chosen.forms == Forms("floats", "floats", "floats", "L2", 128, "L2", "L2")


def test_a_gain_that_may_be_chance_is_none(on, tmp_path):
    def nearly(forms: Forms, kind: str) -> float:
        is_asking = kind in calibration._ROWS_OF_ASKING
        return 1.0 if is_asking or forms == Forms.of(ISA) else 0.97

    assert settle(tmp_path / "library.so", ISA, on(nearly)).forms == Forms.of(ISA)


@pytest.mark.parametrize("asking", ["linear_asks", "linear_asks_once"])
@pytest.mark.parametrize(("gain", "taken"), [(1.01, "L1"), (1.04, "L2")])
def test_a_small_gain_of_weights_counts_as_it_is_measured_more_often(
    on, tmp_path, asking, gain, taken
):
    def nearly(forms: Forms, kind: str) -> float:
        return 1 / gain if kind == asking and getattr(forms, asking) == "L2" else 1.0

    chosen = settle(tmp_path / "library.so", ISA, on(nearly))
    assert chosen.forms == replace(Forms.of(ISA), **{asking: taken})
    assert chosen.ratios[f"{asking} L2"] == pytest.approx(gain, abs=1e-3)


def test_a_gain_that_is_not_found_twice_is_none(on, tmp_path):
    seen: list[Forms] = []

    def once(forms: Forms, kind: str) -> float:
        if forms.few_rows != "floats":
            return 1.0
        seen.append(forms)
        return 0.1 if len(seen) <= calibration._ROUNDS else 1.0

    assert settle(tmp_path / "library.so", ISA, on(once)).forms.few_rows == "pairs"


def test_it_is_measured_once_for_all_processes_and_again_when_asked_for(on, tmp_path):
    library = tmp_path / "library.so"
    first = settle(library, ISA, on(_of_an_intel))
    other = on(lambda forms, kind: 1.0)
    assert settle(library, ISA, other) == first and not other.measured
    assert other.taken == first.forms
    again = calibrate(library, ISA, other)
    assert again.forms == Forms.of(ISA) == other.taken and kept(library, ISA) == again


def test_those_who_come_at_once_wait_for_one(on, tmp_path):
    machine = on(_of_an_intel)
    alone = on(_of_an_intel)
    settle(tmp_path / "alone.so", ISA, alone)
    machine = on(_of_an_intel)
    with ThreadPoolExecutor(4) as pool:
        library = tmp_path / "library.so"
        every = [*pool.map(lambda _: settle(library, ISA, machine), range(4))]
    assert every == every[:1] * 4 and machine.measured == alone.measured


def test_a_folder_that_cannot_be_written_serves_with_the_best_guess(on, tmp_path):
    machine = on(_of_an_intel)
    assert settle(tmp_path / "none" / "library.so", ISA, machine) == Chosen(Forms.of(ISA))
    assert machine.taken == Forms.of(ISA) and not machine.measured


def test_an_interrupt_leaves_nothing_behind_but_the_next_start_measures(on, tmp_path):
    def interrupted(forms: Forms, kind: str) -> float:
        raise KeyboardInterrupt

    library, threads = tmp_path / "library.so", torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        settle(library, ISA, on(interrupted))
    assert torch.get_num_threads() == threads and not forms_of(library).exists()
    assert settle(library, ISA, on(_of_an_intel)).forms.few_rows == "floats"


def test_within_a_trace_it_measures_tensors_that_have_data(on, tmp_path):
    machine, state = on(_of_an_intel), torch.random.get_rng_state()
    with FakeTensorMode(), torch.device("meta"):
        settle(tmp_path / "library.so", ISA, machine)
    assert machine.measured and torch.equal(torch.random.get_rng_state(), state)


def test_the_kernels_of_this_machine_are_calibrated_at_their_first_use():
    try:
        find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    ops = load()
    assert ops.chosen is not None and ops.chosen.forms.serves(ops.isa)
    assert os.access(ops.build.library.parent, os.W_OK)
    assert ops.chosen.ratios and kept(ops.build.library, ops.isa) is not None
