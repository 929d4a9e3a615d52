"""A sample of the op's test-suite on its Triton kernels, interpreted; `make test-all` runs it all.

The suite itself: `tests.compiled_attn.ops.test_reference`, `test_edges`, with the fixture `ops`.
"""

from __future__ import annotations

import pytest

from compiled_attn.ops import NativeOps
from tests.compiled_attn.ops.kernels import TRITON, loaded
from tests.compiled_attn.ops.native_cases import CASES, MIXED
from tests.compiled_attn.ops.native_scene import assert_right, new_tokens, scene
from tests.compiled_attn.ops.test_reference import WRITES, _expect_written, _storage

SAMPLE = [
    "bfloat16", "block 7", "everything", "head size 80", "smaller values", "strided", "int8 HND",
    "e4m3 for bfloat16", "not causal", "padding alone", "more queries than keys", "sinks",
]  # fmt: skip


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return loaded(TRITON)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_step_is_that_of_dense_attention(ops, name):
    step = scene(**CASES[name])
    assert_right(ops.paged_attention(*step.arguments, **step.options), step)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_need_not_be_positive(ops, scale):
    step = scene(MIXED, dim=64)
    step.scale = scale
    assert_right(ops.paged_attention(*step.arguments, **step.options), step)


@pytest.mark.parametrize("name", ["bfloat16", "int8 of bfloat16", "e4m3 HND"])
def test_new_tokens_are_written_bit_for_bit_and_then_seen(ops, name):
    step = scene(MIXED, padding=2, padded_requests=1, poison=0.5, **WRITES[name])
    key, value, slots = new_tokens(step)
    before = {name: tensor.clone() for name, tensor in _storage(step).items()}
    result = ops.paged_attention_(
        step.query, key, value, step.key_cache, step.value_cache, slots, *step.step,
        **step.options,
    )  # fmt: skip
    _expect_written(step, before, slots, {"key": key, "value": value})
    assert_right(result, step)
