"""Requests of few query rows, cut by their keys: no bit depends on how many threads take them."""

from __future__ import annotations

import math

import pytest
import torch

from compiled_attn.ops import NativeOps, available_isas
from tests.compiled_attn.ops.kernels import loaded, threads
from tests.compiled_attn.ops.native_scene import Scene, assert_right, scene

ISAS = (available_isas()[0], available_isas()[-1])  # the reference takes no threads

CUTS = {
    "a segment and one key": {"requests": [(1, 257)]},
    "two segments": {"requests": [(1, 512)], "dtype": torch.bfloat16, "dim": 64},
    "long and short requests": {"requests": [(1, 2900), (1, 3), (1, 511)]},
    "rows that are not whole vectors": {"requests": [(1, 700)], "dim": 24, "value_dim": 20},
    "drafts, which see different keys": {"requests": [(3, 770), (2, 256)]},
    "a window over the end of a segment": {"requests": [(1, 900), (2, 900)], "window": 400},
    "sinks": {"requests": [(1, 600)], "sinks": torch.randn(4)},
    "int8": {"requests": [(1, 1100)], "cache_dtype": torch.int8, "dtype": torch.bfloat16},
    "e4m3": {"requests": [(1, 600)], "cache_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16},
}


@pytest.fixture(params=ISAS, scope="module")
def ops(request) -> NativeOps:
    return loaded(request.param)


def attend(ops: NativeOps, step: Scene, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    with threads(number):
        return ops.paged_attention(*step.arguments, **step.options)


@pytest.mark.parametrize("name", CUTS)
def test_any_number_of_threads_gives_the_same_bits_and_the_right_ones(ops, name):
    step = scene(**{"size": 32, **CUTS[name]})
    one = attend(ops, step, 1)
    assert_right(one, step)
    for number in (2, 3, 7):
        for some, want in zip(attend(ops, step, number), one, strict=True):
            assert torch.equal(some, want)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_what_a_draft_does_not_see_may_be_nan_in_any_segment(ops, number):
    step = scene([(3, 514)], size=32)
    block, slot = int(step.block_table[0, 512 // 32]), 512 % 32
    step.value_cache[block, slot:] = math.nan  # positions 512 and 513: of the last two rows
    out, _ = attend(ops, step, number)
    assert out[0].isfinite().all()
    assert out[1:].isnan().all()


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_segment_of_nan_keys_makes_nan(ops, number):
    step = scene([(1, 768)], size=32)
    step.key_cache[step.block_table[0, 8:16].long()] = math.nan
    out, lse = attend(ops, step, number)
    assert out.isnan().all()
    assert lse.isnan().all()
