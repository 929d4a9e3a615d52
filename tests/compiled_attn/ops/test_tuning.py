"""Measured speeds are saved, and decide which layers are packed."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch
from torch import nn

from compiled_attn.ops import load
from compiled_attn.ops.tuning import Tuning, onednn_sizes
from graphs.backends.onednn_linear import for_cpu

WEIGHT = torch.zeros(32, 64, dtype=torch.bfloat16)


def _tuning(file, ratios: list[float]) -> Tuning:
    return Tuning(load("reference"), file, lambda ops, weight: ratios.pop())


@pytest.mark.parametrize(("ratio", "packs"), [(1.5, True), (0.9, False)])
def test_weights_are_packed_where_that_was_faster(tmp_path, ratio, packs):
    assert (_tuning(tmp_path / "t.json", [ratio]).packing(WEIGHT) == "packed") is packs


@pytest.mark.parametrize(
    ("packed", "widened", "expected"),
    [(1.2, 1.5, "bf16-widen"), (1.5, 1.2, "packed"), (0.8, 1.1, "bf16-widen"), (0.7, 0.9, None)],
)
def test_float32_weights_exact_in_bf16_are_stored_so_where_that_is_fastest(
    tmp_path, packed, widened, expected
):
    tuned = _tuning(tmp_path / "t.json", [widened, packed])
    assert tuned.packing(WEIGHT.float()) == expected
    assert tuned.packing(WEIGHT.float() + 1 / 3) == ("packed" if packed > 1 else None)
    threads = torch.get_num_threads()
    assert tuned.results == {
        f"{threads} threads, 32 x 64, float32": packed,
        f"{threads} threads, 32 x 64, float32 as bf16": widened,
    }


def test_each_size_is_measured_once_for_all_processes(tmp_path):
    file = tmp_path / "t.json"
    first = _tuning(file, [0.5, 2.0])
    assert first.packing(WEIGHT) and first.packing(WEIGHT)
    assert not first.packing(WEIGHT[:16])
    assert _tuning(file, []).packing(WEIGHT)
    threads = torch.get_num_threads()
    assert json.loads(file.read_text()) == {
        f"{threads} threads, 32 x 64": 2.0,
        f"{threads} threads, 16 x 64": 0.5,
    }


def test_who_forgets_drops_what_it_knew_and_not_what_others_find_meanwhile(tmp_path):
    file = tmp_path / "t.json"
    _tuning(file, [4.0]).packing(WEIGHT[:, :32])
    one, other = _tuning(file, [2.0]), _tuning(file, [3.0])
    one.forget()
    assert other.packing(WEIGHT[:16]) and one.packing(WEIGHT)
    assert sorted(json.loads(file.read_text()).values()) == [2.0, 3.0]


def test_processes_that_measure_at_once_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("compiled_attn.ops.tuning._LOCK_SECONDS", 200.0)  # the machine may be busy
    file = tmp_path / "t.json"
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(_measure_some, [(file, first) for first in (1, 6, 11, 16)])
    assert len(json.loads(file.read_text())) == 20


def _measure_some(file, first: int) -> None:
    for outputs in range(first, first + 5):
        _tuning(file, [2.0]).packing(torch.zeros(16 * outputs, 64, dtype=torch.bfloat16))


def test_float32_layers_go_to_onednn_where_that_was_faster_each_size_measured_once(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(8, 8))
    model[3].bfloat16()
    file = tmp_path / "t.json"
    ratios = {4: 1.5, 8: 0.9}  # by outputs
    tuned = Tuning(load("reference"), file, lambda ops, weight: ratios[weight.shape[0]])
    assert onednn_sizes(model, tuned) == {(4, 8)}
    threads = torch.get_num_threads()
    assert json.loads(file.read_text()) == {
        f"{threads} threads, 4 x 8, oneDNN": 1.5,
        f"{threads} threads, 8 x 4, oneDNN": 0.9,
    }
    assert onednn_sizes(model, _tuning(file, [])) == {(4, 8)}


def test_float32_layers_of_this_machine_are_measured():
    if not for_cpu():
        pytest.skip("this torch has no MKL to replace, or no oneDNN to replace it with")
    tuned = Tuning(load("reference"), None)
    tuned.takes_onednn(torch.zeros(24, 16))
    assert all(ratio > 0 for ratio in tuned.results.values())


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"1 threads, 32 x 64": "fast"}', "null"])
def test_a_file_that_is_none_of_ours_is_measured_over(tmp_path, text):
    file = tmp_path / "t.json"
    file.write_text(text)
    assert _tuning(file, [2.0]).packing(WEIGHT)
    assert 2.0 in json.loads(file.read_text()).values()


def test_a_folder_that_cannot_be_written_serves_too(tmp_path):
    assert _tuning(tmp_path / "none" / "t.json", [2.0]).packing(WEIGHT)


def test_the_kernels_of_this_machine_are_measured(ops):
    tuned = Tuning(ops, None)
    for weight in (WEIGHT, WEIGHT.float()):
        tuned.packing(weight)
    assert len(tuned.results) == 3 and all(ratio > 0 for ratio in tuned.results.values())
