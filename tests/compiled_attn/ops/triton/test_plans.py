"""Tiles and splits: do not change results, depend on sizes alone, and are saved."""

from __future__ import annotations

import json

import pytest
import torch
from accelerator.traffic import Rows, attend_traffic, floor_of

from compiled_attn.ops.triton.plans import Plans
from compiled_attn.ops.triton.tiles import (
    Chip,
    Plan,
    Problem,
    Tile,
    key_blocks,
    other_splits,
    other_tiles,
    plan,
)
from tests.compiled_attn.ops.kernels import interpreted
from tests.compiled_attn.ops.native_scene import assert_right, scene
from tests.slow import slow_but

DECODE = Problem(32, 32, 8, 4, 128, 128, 8192, 16, "bfloat16", "none")
OTHER = DECODE._replace(tokens=64)
CPU = torch.device("cpu")
CHIP = Chip(132, is_hopper=False)

PLANS = {
    "more splits than tiles": (Plan(Tile(16, 16, 4, 1), 8), {}),
    "five heads a KV head": (Plan(Tile(16, 16, 4, 1), 2), {"heads": 10}),
    "more heads than rows": (Plan(Tile(16, 16, 4, 1), 1), {"heads": 40, "kv_heads": 2}),
    "more heads than rows, in splits": (Plan(Tile(16, 32, 4, 1), 4), {"heads": 24, "kv_heads": 1}),
    "a tile for all": (Plan(Tile(128, 128, 4, 1), 1), {}),
    "windows in splits": (Plan(Tile(16, 16, 4, 1), 4), {"window": 19, "softcap": 3.0}),
    "sinks in splits": (
        Plan(Tile(32, 16, 4, 1), 2),
        {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0]), "padding": 3, "padded_requests": 1},
    ),
    "two blocks of a head": (Plan(Tile(16, 16, 4, 1), 2), {"dim": 72, "value_dim": 64}),
}


@pytest.mark.parametrize("name", slow_but(("sinks in splits", "more heads than rows"), PLANS))
def test_a_step_is_that_of_dense_attention_in_any_plan(name):
    interpreted()
    from compiled_attn.ops.triton.launch import attend

    chosen, options = PLANS[name]
    step = scene([(1, 70), (5, 41), (1, 3), (9, 9)], size=8, **options)
    assert_right(attend(step.call, chosen), step)


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("keys", [8192, 32768])
@pytest.mark.parametrize("requests", [1, 2, 3, 4, 8, 16])
def test_requests_that_decode_are_split_until_the_device_is_full(requests, keys, is_hopper):
    problem = DECODE._replace(tokens=requests, requests=requests, keys=keys)
    programs = plan(problem, Chip(132, is_hopper)).splits * requests * problem.kv_heads
    assert 132 <= programs <= 2 * 132


@pytest.mark.parametrize("codes", ["none", "e4m3"])
@pytest.mark.parametrize(
    ("requests", "keys", "splits"),
    [(1, 8192, 32), (16, 1024, 2), (64, 1024, 1), (64, 2048, 1), (64, 8192, 1), (256, 1024, 1)],
)
def test_programs_of_a_decode_with_keys_fill_the_device_with_few_more_bytes(
    requests, keys, splits, codes
):
    problem = DECODE._replace(tokens=requests, requests=requests, keys=keys, codes=codes)
    chosen = plan(problem, Chip(132, is_hopper=True))
    assert chosen.splits == splits
    # A program without rows ends at once: those of requests count, two a multiprocessor.
    programs = chosen.splits * requests * problem.kv_heads
    assert programs / (-(-programs // 264) * 264) >= 0.96
    rows = [Rows(1, keys)] * requests
    assert attend_traffic(problem, chosen, rows).total < 1.08 * floor_of(problem, rows).total


def test_few_keys_or_many_rows_are_not_split():
    assert plan(DECODE._replace(tokens=4096), CHIP).splits == 1
    assert plan(DECODE._replace(tokens=1, requests=1, keys=64), CHIP).splits == 1


def test_a_program_merges_no_more_than_each_reads():
    latent = Problem(1, 1, 1, 16, 576, 512, 8192, 16, "bfloat16", "none")
    splits = plan(latent, CHIP).splits
    part, read = 16 * 512 * 4, latent.keys * (576 + 512) * 2
    assert splits * part <= read / splits < 4 * (2 * splits) * part
    assert plan(latent._replace(kv_heads=8, group=4, key_dim=128, value_dim=128), CHIP).splits == 32


def test_a_head_takes_two_blocks_where_one_would_be_larger():
    assert [key_blocks(dim) for dim in (7, 64, 80, 112, 128, 192, 576)] == [
        (16, 0), (64, 0), (64, 16), (128, 0), (128, 0), (128, 64), (512, 64),
    ]  # fmt: skip


def test_other_plans_are_others():
    usual = plan(DECODE, CHIP)
    assert usual.tile not in [each.tile for each in other_tiles(DECODE, CHIP)]
    assert usual not in other_splits(usual)


def test_a_problem_is_measured_once_while_that_is_wanted_and_kept_as_json():
    plans, asked = Plans(), []
    chosen = Plan(Tile(64, 16, 8, 3), 2, "varlen")
    assert plans.of(DECODE, CPU) == plan(DECODE, CHIP) and not plans.export(CPU)
    plans.measure = lambda problem, device: asked.append(problem) or chosen
    assert plans.of(DECODE, CPU) == plans.of(DECODE, CPU) == chosen
    assert asked == [DECODE]
    plans.measure = None
    assert plans.of(DECODE, CPU) == chosen
    later = Plans()
    later.adopt(json.loads(json.dumps(plans.export(CPU))), CPU)
    assert later.of(DECODE, CPU) == chosen


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [16, 16, 4, 2, 1],
        [16, 16, 4, 2, 0, "triton"],
        [16, 16, 4, 2, "1", "triton"],
        [16, 16, 4, 2, True, "triton"],
        [48, 16, 4, 2, 1, "triton"],
        [16, 16, 4, 2, 1, 1, "triton"],
        [16, 16, 4, 2, 1, "cutlass"],
        [16, 16, 4, 2, 1, 1],
        [16, 16, 4, 2, 1, ["triton"]],
    ],
)
def test_what_is_no_plan_is_not_adopted(numbers):
    plans = Plans()
    with pytest.raises(ValueError, match=r"expected (rows|a kernel of triton, varlen).* got .*: "):
        plans.adopt({DECODE.name: [16, 16, 4, 2, 1, "triton"], OTHER.name: numbers}, CPU)
    assert not plans.export(CPU)


def test_a_name_that_is_no_problem_is_not_adopted():
    for name in ("", "tokens 4", DECODE.name.replace("tokens 32", "tokens many")):
        with pytest.raises(ValueError):
            Plans().adopt({name: [16, 16, 4, 2, 1, "triton"]}, CPU)
    assert Problem.named(DECODE.name) == DECODE


def test_each_device_has_plans_of_its_own():
    first, second = torch.device("meta", 0), torch.device("meta", 1)
    plans, asked = Plans(), []
    plans.measure = lambda problem, device: (
        asked.append(device) or Plan(Tile(16, 16, 4, 1), 1 + device.index)
    )
    assert [plans.of(DECODE, each).splits for each in (first, second, first)] == [1, 2, 1]
    assert asked == [first, second]
    later = Plans()
    later.adopt(plans.export(second), first)
    assert later.of(DECODE, first).splits == 2
    assert later.of(DECODE, second) == plan(DECODE, CHIP) and not later.export(second)


def test_what_a_call_looks_up_is_a_tuple_and_builds_no_name(monkeypatch):
    def fail(self):
        raise AssertionError("a name is for files")

    plans = Plans()
    plans.adopt({DECODE.name: [16, 16, 4, 2, 3, "triton"]}, CPU)
    monkeypatch.setattr(Problem, "name", property(fail))
    other = DECODE._replace(tokens=1, requests=1)
    assert plans.of(DECODE, CPU).splits == 3
    assert plans.of(other, CPU) is plans.of(other, CPU)
