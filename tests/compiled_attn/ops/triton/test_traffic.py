"""The model of the traffic of a launch, next to a count of what the interpreted kernels access."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from accelerator.traffic import (
    Features,
    Rows,
    attend_traffic,
    floor_of,
    requests_of,
    write_traffic,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.ops.triton.arguments import problem_of
from compiled_attn.ops.triton.tiles import Plan, Problem, Tile
from tests.compiled_attn.ops.kernels import interpreted
from tests.compiled_attn.ops.native_cases import MIXED
from tests.compiled_attn.ops.native_scene import Scene, assert_right, new_tokens, scene
from tests.compiled_attn.ops.triton.counting import OTHERS, counted
from tests.slow import slow_but

TENSORS = "query", "key_cache", "value_cache", "key_scale", "value_scale", "block_table"
LONG: dict[str, Any] = {"requests": [(5, 70), (1, 97)], "size": 8, "window": 37, "padding": 1}
SPLIT = Plan(Tile(16, 16, 4, 1), 3)


@pytest.fixture(autouse=True)
def interpreter():
    interpreted()


def assert_counted(step: Scene, plan: Plan, attend: Any = None) -> None:
    """Runs a step, and compares the bytes of each tensor with the model's."""
    if attend is None:
        from compiled_attn.ops.triton.launch import attend
    call = step.call
    with counted() as found:
        out, lse = attend(call, plan)
    assert_right((out, lse), step)
    model = attend_traffic(
        problem_of(call), plan, requests_of(call), Features(call.scoring.window, call.causal)
    )
    of_call = {name: getattr(call, name) for name in TENSORS}
    ignored = {"starts": call.query_start_loc, "lengths": call.seq_lens,
               "slopes": call.scoring.alibi_slopes, "sinks": call.scoring.sinks}  # fmt: skip
    read = found.read({**of_call, **ignored, "out": out, "lse": lse})
    written = found.written({**of_call, "out": out, "lse": lse})
    assert {name: read[name] for name in TENSORS} == {name: model.read[name] for name in TENSORS}
    assert {name: written[name] for name in ("out", "lse")} == {
        name: model.written[name] for name in ("out", "lse")
    }
    assert not any(written[name] for name in TENSORS) and read["out"] + read["lse"] == 0
    assert written[OTHERS] == model.written["parts"]
    # Sums are read once; of the two numbers next to them, maxima may be read again.
    sums = model.read["parts"] * call.value_cache.shape[3] // (call.value_cache.shape[3] + 2)
    assert model.read["parts"] <= read[OTHERS] <= 2 * model.read["parts"] - sums


@settings(max_examples=10)
@given(
    requests=st.lists(st.tuples(st.sampled_from([1, 1, 2, 5, 17]), st.integers(0, 50)), max_size=4),
    tile=st.tuples(
        st.sampled_from([16, 32]), st.sampled_from([16, 32]), st.sampled_from([1, 1, 2, 4])
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (20, 1)]),
    dims=st.sampled_from([(16, 16), (24, 8), (72, 16)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cache=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    size=st.sampled_from([1, 5, 12, 16, 32]),
    window=st.sampled_from([None, None, 1, 7, 30]),
    layout=st.sampled_from(["NHD", "HND", "strided"]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_the_model_has_the_bytes_that_random_steps_access(
    requests, tile, heads, dims, dtype, cache, size, window, layout, padding, seed
):
    layout = "HND" if cache and layout == "strided" else layout
    step = scene(
        requests, heads=heads[0], kv_heads=heads[1], dim=dims[0], value_dim=dims[1], size=size,
        dtype=dtype, cache_dtype=cache, layout=layout, padding=padding, padded_requests=padding,
        seed=seed, window=window,
    )  # fmt: skip
    assert_counted(step, Plan(Tile(*tile[:2], 4, 1), tile[2]))


@pytest.mark.parametrize("plan", [SPLIT, SPLIT._replace(splits=1)])
@pytest.mark.parametrize("options", [{"causal": False}, {"sinks": torch.zeros(4), "padding": 2}])
def test_the_model_has_the_bytes_of_all_keys_and_of_sinks(options, plan):
    assert_counted(scene(MIXED, size=8, **options), plan)


@pytest.mark.parametrize("cache", [None, torch.int8])
def test_the_model_has_the_bytes_of_a_write(cache):
    from compiled_attn.ops.triton.launch import paged_attention_

    step = scene(MIXED, padding=2, dtype=torch.bfloat16, cache_dtype=cache, poison=0.5)
    key, value, slots = new_tokens(step)
    slots[1] = -1  # not written
    with counted() as found:
        paged_attention_(
            step.query, key, value, step.key_cache, step.value_cache, slots, *step.step,
            **step.options,
        )  # fmt: skip
    model = write_traffic(problem_of(step.call), len(slots) - 1)
    tensors = {name: getattr(step.call, name) for name in ("key_cache", "value_cache",
               "key_scale", "value_scale")}  # fmt: skip
    written = found.written(tensors)
    assert {name: written[name] for name in tensors} == model.written
    new = {"key": key, "value": value, "slots": slots}
    read = found.read(new)
    assert {name: read[name] for name in new} == model.read


# Changes that leave the result right and cost traffic.
MUTANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "values of a tile read twice": (
        "values = tl.load(value_cache + value_at + value_dims, mask=is_value, other=0)",
        "values = tl.load(value_cache + value_at + value_dims, mask=is_value, other=0)\n"
        "            values = tl.load(value_cache + value_at + value_dims, mask=is_value, other=0)",
        {"requests": [(1, 40)]},
    ),
    "keys after the diagonal": (
        "key_end, full_end = last_position + 1,",
        "key_end, full_end = length,",
        {"requests": [(40, 60)]},
    ),
    "keys before the window": (
        "key_begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS",
        "key_begin = tl.maximum(first_position - window - 32, 0) // KEYS * KEYS",
        LONG,
    ),
}


@pytest.mark.parametrize("name", slow_but(["values of a tile read twice"], MUTANTS))
def test_a_kernel_that_reads_more_is_found(room, name):
    text, changed, case = MUTANTS[name]
    path = room / "attend.py"
    source = path.read_text()
    assert source.count(text) == 1
    path.write_text(source.replace(text, changed))
    importlib.invalidate_caches()
    attend = importlib.import_module(f"{room.name}.launch").attend
    with pytest.raises(AssertionError, match="_cache"):
        assert_counted(scene(**case), SPLIT._replace(splits=1), attend)


@pytest.mark.slow
@pytest.mark.parametrize("case", [LONG, {"requests": [(40, 60)]}])
def test_the_kernel_as_it_is_reads_what_the_model_says(room, case):
    attend = importlib.import_module(f"{room.name}.launch").attend
    assert_counted(scene(**case), SPLIT, attend)


def test_a_decode_is_near_its_floor_and_a_prompt_reads_keys_for_each_tile():
    decode = Problem(64, 64, 8, 4, 128, 128, 1024, 16, "bfloat16", "none")
    plan, rows = Plan(Tile(16, 128, 4, 2), 1), [Rows(1, 1024)] * 64
    floor = floor_of(decode, rows)
    assert floor.read["key_cache"] == 64 * 1024 * 8 * 128 * 2
    assert floor.flops == 4 * 64 * 1024 * 32 * 128
    assert attend_traffic(decode, plan, rows).total < 1.002 * floor.total
    prompt, rows = decode._replace(tokens=1024, requests=1), [Rows(1024, 1024)]
    read = attend_traffic(prompt, Plan(Tile(128, 128, 8, 2), 1), rows).read["key_cache"]
    # Tiles of 32 tokens read 1, 1, 1, 1, 2, 2, ... tiles of 128 keys.
    assert read == 4 * sum(range(1, 9)) * 128 * 8 * 128 * 2


def test_the_floor_of_a_window_has_the_keys_that_any_row_sees():
    problem = Problem(4, 1, 1, 1, 16, 16, 64, 8, "float32", "none")
    floor = floor_of(problem, [Rows(4, 40)], Features(window=10))
    assert floor.read["key_cache"] == 13 * 16 * 4  # keys 27 to 39
    assert floor.flops == 4 * 16 * 4 * 10
