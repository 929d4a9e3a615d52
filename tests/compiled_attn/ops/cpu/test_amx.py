"""Prefill in emulated AMX tiles, and that the registers give the same bits."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.ops import NativeOps, NativeUnavailable, available_isas
from tests.compiled_attn.ops.kernels import AMX, WITHOUT_AMX, loaded, threads, tuned
from tests.compiled_attn.ops.native_cases import CASES
from tests.compiled_attn.ops.native_scene import Scene, assert_right, scene

# Around tiles of 16 and 32 rows and keys, chunks of 256 keys.
EDGES = [(3, 3), (4, 40), (5, 257), (8, 16), (9, 300), (16, 256), (33, 33), (40, 520)]
OF_BFLOAT16 = [
    name for name, case in CASES.items() if case.get("dtype", torch.bfloat16) == torch.bfloat16
]


@pytest.fixture(scope="module")
def plain() -> NativeOps:
    return loaded(WITHOUT_AMX, plain_tiles=True)


def _scene(requests=EDGES, **options) -> Scene:
    return scene(requests, **{"dtype": torch.bfloat16, "heads": 8, "kv_heads": 2, **options})


@pytest.mark.parametrize("name", OF_BFLOAT16)
def test_a_step_is_that_of_dense_attention(plain, name):
    step = scene(**{**CASES[name], "dtype": torch.bfloat16})
    assert_right(plain.paged_attention(*step.arguments, **step.options), step)


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        *(([(9, 40), (33, 260)], {"dim": d, "heads": h, "value_dim": 48})
          for d in (7, 40, 200) for h in (2, 10)),
        *(([(40, 320), (9, 280)], {"window": window}) for window in (1, 16, 300)),
        ([(200, 300)], {"heads": 2, "kv_heads": 1, "dim": 32}),  # several bands
    ],
)  # fmt: skip
def test_any_heads_windows_and_bands(plain, requests, options):
    step = _scene(requests, **options)
    assert_right(plain.paged_attention(*step.arguments, **step.options), step)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("scoring", ["plain", "softcap", "ALiBi", "sinks", "not causal", "scale"])
def test_every_kind_of_scoring(plain, window, scoring):
    options = {
        "softcap": {"softcap": 2.0},
        "ALiBi": {"alibi_slopes": torch.rand(8)},
        "sinks": {"sinks": torch.randn(8)},
        "not causal": {"causal": False},
    }.get(scoring, {})
    if scoring == "not causal" and window:
        pytest.skip("windows are causal")
    step = _scene(window=window, **options)
    if scoring == "scale":
        step.scale = -step.scale
    assert_right(plain.paged_attention(*step.arguments, **step.options), step)


def test_a_request_gets_the_same_bits_whatever_its_neighbours(plain):
    step = _scene()
    together, _ = plain.paged_attention(*step.arguments)
    for rows, alone in step.each_alone():
        assert torch.equal(plain.paged_attention(*alone)[0], together[rows])


def test_the_number_of_threads_changes_no_bit_though_bands_depend_on_it(plain):
    step = _scene([(200, 420)])
    last = step.block_table[0, 419 // step.value_cache.shape[1]].long()
    step.value_cache[last] = float("nan")  # seen by the last rows
    with threads(1):
        alone, _ = plain.paged_attention(*step.arguments)
    with threads(3):
        together, _ = plain.paged_attention(*step.arguments)
    assert alone[0].isfinite().all() and alone[-1].isnan().any()
    assert torch.equal(alone.isnan(), together.isnan())
    assert torch.equal(alone.nan_to_num(), together.nan_to_num())


@pytest.mark.parametrize("causal", [True, False])
def test_scores_of_any_size_have_finite_weights(plain, causal):
    step = _scene([(40, 300)])
    step.query *= 2.0**60
    for each in plain.paged_attention(*step.arguments, causal=causal):
        assert each.isfinite().all()


@pytest.mark.skipif(AMX not in available_isas(), reason="needs a processor with AMX")
@pytest.mark.parametrize("kind", ["normal", "subnormal", "huge"])
def test_the_registers_give_the_bits_of_the_plain_form(plain, kind):
    try:
        hardware = loaded(AMX)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    step = _scene(sinks=torch.randn(8), dim=72)
    size = {"normal": 1.0, "subnormal": 2.0**-128, "huge": 2.0**62}[kind]
    step.query *= size
    step.value_cache *= size
    want = plain.paged_attention(*step.arguments, **step.options)
    with tuned(hardware, prefill="amx"):
        got = hardware.paged_attention(*step.arguments, **step.options)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
