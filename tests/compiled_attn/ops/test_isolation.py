"""A key or value that is not finite reaches the rows of its own request that see it, alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from compiled_attn.ops import NativeOps
from compiled_attn.ops.cpu.isa import available_isas
from tests.compiled_attn.ops.kernels import ON_DEVICES, WITHOUT_AMX, loaded
from tests.compiled_attn.ops.native_scene import Scene, scene

SIZE = 4
STEPS = {
    "drafts": [(3, 40), (1, 9)], "a prompt of few rows": [(7, 7)], "tiles": [(40, 300)],
    "a prompt": [(90, 90)], "drafts in splits": [(2, 1500)], "tiles in splits": [(60, 2300)],
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "int8": {"cache_dtype": torch.int8},
    "int8 for bfloat16": {"cache_dtype": torch.int8, "dtype": torch.bfloat16},
    "e4m3 for bfloat16": {"cache_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16},
    "e5m2": {"cache_dtype": torch.float8_e5m2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "head size 7": {"dim": 7},
    "everything": {
        "window": 7,
        "softcap": 2.0,
        "sinks": torch.linspace(-1, 1, 4),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]),
        "layout": "HND",
        "dim": 64,
    },
}


def _isas() -> Iterator[Any]:
    for number, isa in enumerate([*available_isas(), "reference"]):
        yield pytest.param(isa, marks=pytest.mark.slow if number else ())


def _cases() -> Iterator[Any]:
    quick = {*product(["drafts", "a prompt"], KINDS, ["plain", "window"])}
    quick |= {("tiles in splits", "float32", "plain"), ("drafts in splits", "float32", "plain")}
    for case in product(STEPS, KINDS, OPTIONS):
        if "splits" in case[0] and case[2] not in ("plain", "window"):
            continue
        yield pytest.param(*case, marks=() if case in quick else pytest.mark.slow)


def _poison(step: Scene, which: str, position: int, poison: float) -> None:
    """Of the first request, in the last KV head."""
    at = int(step.block_table[0, position // SIZE]), position % SIZE, -1
    scale = step.options.get(f"{which}_scale")
    if scale is None:
        getattr(step, f"{which}_cache")[at][0] = poison
    else:
        scale[at] = poison


@pytest.mark.parametrize("isa", [*_isas()])
@pytest.mark.parametrize(("step", "kind", "options"), [*_cases()])
def test_bits_of_rows_that_do_not_see_it_stay(isa, step, kind, options):
    _expect_isolated(loaded(isa), step, kind, options)


def test_bits_of_rows_that_do_not_see_it_stay_in_emulated_tiles():
    _expect_isolated(loaded(WITHOUT_AMX, plain_tiles=True), "tiles", "bfloat16", "plain")


@pytest.mark.parametrize("device", ON_DEVICES)
@pytest.mark.parametrize(
    ("step", "kind", "options"),
    [
        ("drafts", "float32", "plain"),
        ("drafts", "int8 for bfloat16", "window"),
        ("a prompt of few rows", "e5m2", "everything"),
    ],
)
def test_bits_of_rows_that_do_not_see_it_stay_on_a_device(device, step, kind, options):
    _expect_isolated(loaded(device), step, kind, options)


def _expect_isolated(ops: NativeOps, step: str, kind: str, options: str) -> None:
    settings = KINDS[kind] | OPTIONS[options]
    clean = scene(STEPS[step], size=SIZE, **settings)
    count, length = STEPS[step][0]
    position = torch.arange(length - count, length)
    want = ops.paged_attention(*clean.arguments, **clean.options)
    poisons = (math.nan, math.inf, -math.inf)
    positions = {length - 1, length - count // 2 - 1, max(length - count - 3, 0)}
    for which, at, poison in product(("key", "value"), positions, poisons):
        other = scene(STEPS[step], size=SIZE, **settings)
        _poison(other, which, at, poison)
        got = ops.paged_attention(*other.arguments, **other.options)
        sees = position >= at
        sees &= position - at < settings.get("window", length)
        safe = torch.ones(len(got[0]), dtype=torch.bool)
        safe[:count] = ~sees
        for mine, theirs in zip(got, want, strict=True):
            assert torch.equal(mine[safe], theirs[safe]), (which, at, poison)
        if math.isnan(poison):
            assert got[0][~safe].isnan().flatten(1).any(1).all(), (which, at)


def test_sums_that_overflow_by_themselves_are_what_they_were(ops):
    """Not finite, though no value is: the rows before stay, as in any other step."""
    step = scene([(40, 40)], size=SIZE)
    step.value_cache.fill_(3e38)
    out, lse = ops.paged_attention(*step.arguments, **step.options)
    assert out[0].isfinite().all() and out[-1].isinf().all() and lse.isfinite().all()
