"""The fastest plan is found by the clock, with calls of the problem's own sizes."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.ops.triton.tiles import Chip, Problem, plan
from tests.compiled_attn.ops.kernels import interpreted

SMALL = Problem(4, 4, 2, 2, 16, 16, 128, 8, "float32", "none")
CPU = torch.device("cpu")
CHIP = Chip(132, is_hopper=False)


@pytest.fixture(scope="module")
def autotune():
    interpreted()
    from compiled_attn.ops.triton import autotune

    return autotune


@pytest.mark.parametrize("codes", ["none", "int8", "e4m3", "e5m2"])
def test_a_call_of_a_problem_has_its_sizes_and_gives_numbers(autotune, codes):
    from compiled_attn.ops.triton.arguments import problem_of
    from compiled_attn.ops.triton.launch import attend

    problem = Problem(4, 3, 2, 2, 16, 8, 64, 8, "bfloat16", codes)
    call = autotune.call_of(problem, CPU)
    assert problem_of(call) == problem
    out, lse = attend(call)
    assert out.isfinite().all() and lse.isfinite().all()


def test_the_fastest_tile_is_taken_and_then_the_fastest_number_of_splits(autotune):
    def clock(run):
        chosen = run.args[1]
        return abs(chosen.tile.rows - 16) + abs(chosen.tile.keys - 16) - chosen.splits / 100

    best = autotune.tune(SMALL, CPU, clock)
    assert best.tile[:2] == (16, 16)
    assert best.splits == 8  # twice as many as usual for a tile of 16 keys


def test_a_plan_that_the_device_has_no_room_for_is_passed_over(autotune):
    import triton

    usual = plan(SMALL, CHIP)

    def clock(run):
        if run.args[1] != usual:
            raise triton.OutOfResources(10**6, 10**5, "shared memory")
        return 1.0

    assert autotune.tune(SMALL, CPU, clock) == usual


def test_a_device_without_memory_to_measure_in_takes_the_usual_plan(autotune, monkeypatch):
    def clock(run):
        if run.args[1].splits > 1:
            raise torch.OutOfMemoryError
        return 1.0

    assert autotune.tune(SMALL, CPU, clock).splits == 1

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(autotune, "call_of", full)
    assert autotune.tune(SMALL, CPU) == plan(SMALL, CHIP)
