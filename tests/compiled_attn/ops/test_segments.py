"""With segments, the bits of a row are the same whatever other rows its step has."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_attn.errors import KernelArgumentError
from compiled_attn.ops import NativeOps
from compiled_attn.ops.cpu.isa import available_isas
from tests.compiled_attn.ops.kernels import BEST, TRITON, WITHOUT_AMX, loaded, threads, tuned
from tests.compiled_attn.ops.native_scene import Scene, assert_right, scene

LENGTH = 620
CHUNKS = (1, 2, 3, 7, 40, 300)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "int8": {"cache_dtype": torch.int8},
    "int8 for bfloat16": {"cache_dtype": torch.int8, "dtype": torch.bfloat16},
    "e4m3 for bfloat16": {"cache_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16},
    "e5m2": {"cache_dtype": torch.float8_e5m2},
}
SHAPES: dict[str, dict[str, Any]] = {
    "groups of 2": {},
    "groups of 3": {"heads": 9, "kv_heads": 3, "dim": 64},
    "one head": {"heads": 1, "kv_heads": 1, "dim": 7},
    "latents": {"heads": 40, "kv_heads": 1, "dim": 48, "value_dim": 32},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "softcap": {"softcap": 2.0},
    "everything": {"window": 300, "softcap": 2.0, "layout": "HND"},
    "not causal": {"causal": False},
}
QUICK = {*product(["float32", "bfloat16"], SHAPES, ["plain", "window"])}


def _cases() -> Any:
    for number, isa in enumerate([*available_isas(), "reference"]):
        for case in product(KINDS, SHAPES, OPTIONS):
            is_quick = number == 0 and case in QUICK
            yield pytest.param(isa, *case, marks=() if is_quick else pytest.mark.slow)


def prompt(length: int, kind: str, shape: str, options: str) -> Scene:
    step = scene([(length, length), (5, 40)], **KINDS[kind], **SHAPES[shape], **OPTIONS[options])
    heads = step.query.shape[1]
    if options == "everything":
        step.options["sinks"] = torch.linspace(-1, 1, heads)
        step.options["alibi_slopes"] = torch.linspace(0.5, 0.05, heads)
    return step


def run(ops: NativeOps, step: Scene) -> tuple[Tensor, Tensor]:
    return ops.paged_attention(*step.arguments, **step.options, segment=256)


def rows_of(
    ops: NativeOps, step: Scene, begin: int, end: int, length: int, *, is_mixed: bool
) -> tuple[Tensor, Tensor]:
    """The rows begin .. end of the first request, in a step of their own or with the second."""
    seen = end if step.options.get("causal", True) else length
    both = slice(0, 2 if is_mixed else 1)
    query = torch.cat([step.query[begin:end], step.query[length:] if is_mixed else query_of(step)])
    lengths = torch.tensor([seen, 40]).int()[both]
    starts = torch.tensor([0, end - begin, end - begin + 5]).int()[: both.stop + 1]
    caches = step.key_cache, step.value_cache
    arguments = query, *caches, step.block_table[both], lengths, starts, step.scale
    out, lse = ops.paged_attention(*arguments, **step.options, segment=256)
    return out[: end - begin], lse[: end - begin]


def query_of(step: Scene) -> Tensor:
    return step.query[:0]


def assert_same_bits(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        bits = torch.int32 if a.dtype == torch.float32 else torch.int16
        assert torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


@pytest.mark.parametrize(("isa", "kind", "shape", "options"), [*_cases()])
def test_bits_of_a_row_do_not_depend_on_the_rows_of_its_step(isa, kind, shape, options):
    length = 70 if isa == "reference" else LENGTH
    ops, step = loaded(isa), prompt(length, kind, shape, options)
    with threads(2):
        whole = run(ops, step)
        assert_right(whole, step)
    for count, chunk in enumerate(CHUNKS):
        begins = range(0, length, chunk) if chunk > 3 else range(0, length, 61)
        with threads(1 + count % 2):
            for begin in begins:
                end = min(begin + chunk, length)
                if step.options.get("causal", True) or end == length:
                    got = rows_of(ops, step, begin, end, length, is_mixed=count % 3 == 0)
                    assert_same_bits(got, tuple(each[begin:end] for each in whole))


@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_long_request_is_split_among_threads(count):
    ops, step = loaded(BEST), scene([(count, 5000)], heads=9, kv_heads=3, dim=64)
    with threads(1):
        alone = run(ops, step)
    assert_right(alone, step)
    for number in (2, 7):
        with threads(number):
            assert_same_bits(run(ops, step), alone)


@pytest.mark.parametrize("decode", ["bf16-dot", "float32"])
@pytest.mark.skipif(BEST == WITHOUT_AMX, reason="tuned where both kernels exist")
def test_tuning_chooses_the_kernel_of_all_rows(decode):
    step = prompt(LENGTH, "bfloat16", "groups of 3", "plain")
    with tuned(loaded(BEST), decode=decode) as ops:
        whole = run(ops, step)
        got = rows_of(ops, step, 300, 301, LENGTH, is_mixed=False)
        assert_same_bits(got, tuple(each[300:301] for each in whole))


def test_values_that_are_not_finite_stay_with_the_rows_that_see_them():
    ops, step = loaded(BEST), prompt(LENGTH, "float32", "groups of 2", "plain")
    clean = run(ops, step)
    step.value_cache[step.block_table[0, 100], 1] = torch.nan  # of position 401
    out, lse = run(ops, step)
    assert_same_bits((out[:401], lse[:401]), (clean[0][:401], clean[1][:401]))
    assert out[401:LENGTH].isnan().all()


@pytest.mark.parametrize("isa", [BEST, "reference", TRITON])
@pytest.mark.parametrize("segment", [0, 100, -64])
def test_a_bad_segment_is_an_error(isa, segment):
    step = scene([(1, 9)])
    with pytest.raises(KernelArgumentError, match=f"segment .*got {segment}: "):
        loaded(isa).paged_attention(*step.arguments, segment=segment)
