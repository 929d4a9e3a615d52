"""Kernel tunings: which there are, saving and reading them, and that each gives right results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch

from compiled_attn.ops import NativeOps, packed_linear
from compiled_attn.ops.cpu import kernel_tuning
from compiled_attn.ops.cpu.isa import ISAS
from compiled_attn.ops.cpu.kernel_tuning import (
    CACHES,
    KernelTuning,
    TuningResult,
    bf16_weight_dot_kinds,
    dot_kinds,
)
from compiled_attn.ops.cpu.libraries import kernel_tuning_file
from tests.compiled_attn.ops.kernels import BEST, WITHOUT_AMX, loaded, tuned
from tests.compiled_attn.ops.native_scene import Scene, assert_right, scene

REQUESTS = [(1, 300), (40, 300), (2, 70)]
AMX = KernelTuning("bf16-dot", "amx", "amx")
DOT = KernelTuning("bf16-dot", "bf16-dot", "bf16-dot")


@pytest.fixture(params=[False, True], ids=["of this processor", "emulated AMX"])
def ops(request) -> Iterator[NativeOps]:
    ops = loaded(WITHOUT_AMX, plain_tiles=True) if request.param else loaded(BEST)
    with tuned(ops):
        yield ops


def _step() -> Scene:
    return scene(REQUESTS, dtype=torch.bfloat16, heads=8, kv_heads=2)


def test_dot_products_need_their_instruction_sets():
    for isa in ISAS:
        assert KernelTuning.default(isa).fits(isa) and dot_kinds(isa)[-1] == "float32"
    assert dot_kinds("amx_bf16") == ["amx", "bf16-dot", "float32"]
    assert dot_kinds("avx512_bf16") == ["bf16-dot", "float32"]
    assert dot_kinds("avx512") == dot_kinds("avx2") == dot_kinds("neon") == ["float32"]
    assert KernelTuning.default("amx_bf16") == KernelTuning("bf16-dot", "amx", "amx", "L2", 32)
    assert not KernelTuning("amx", "amx", "amx").fits("amx_bf16")
    assert not replace(AMX, linear_prefetch="L3").fits("amx_bf16")
    assert not replace(AMX, linear_prefetch_once="L3").fits("amx_bf16")
    assert not KernelTuning("float32", "bf16-dot", "float32").fits("avx512")
    assert bf16_weight_dot_kinds("amx_bf16") == ["float32", "amx"]
    assert bf16_weight_dot_kinds("avx512_bf16") == bf16_weight_dot_kinds("neon") == ["float32"]
    assert replace(AMX, linear_bf16_weights="amx").fits("amx_bf16")
    assert not replace(DOT, linear_bf16_weights="amx").fits("avx512_bf16")
    assert not replace(AMX, linear_bf16_weights="bf16-dot").fits("amx_bf16")


@pytest.mark.parametrize("products", ["amx", "bf16-dot", "float32"])
def test_attention_is_right_with_each_kind_of_dot_products(ops, products):
    few = "bf16-dot" if products == "amx" else products
    kernel_tuning.apply(ops.build.library, KernelTuning(few, products, products, "L1", 128))
    step = _step()
    assert_right(ops.paged_attention(*step.arguments, **step.options), step)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("products", ["amx", "bf16-dot", "float32"])
def test_linear_layers_are_right_with_each_kind_of_dot_products(ops, products, rows):
    kernel_tuning.apply(ops.build.library, KernelTuning("bf16-dot", "amx", products))
    torch.manual_seed(0)
    weight, input = torch.randn(96, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    out = ops.packed_linear(input, packed_linear.pack(weight))
    expected = input.double() @ weight.double().T
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2**-8)


def test_bf16_weights_in_tiles_are_other_sums(ops):
    torch.manual_seed(0)
    weight, input = torch.randn(96, 320).bfloat16().float(), torch.randn(40, 320)
    outs = []
    for products in ("float32", "amx"):
        kernel_tuning.apply(ops.build.library, replace(AMX, linear_bf16_weights=products))
        outs.append(ops.packed_linear(input, packed_linear.pack_bf16(weight)))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-4)
    has_tiles = ops.isa == "amx_bf16" or "plain_tiles" in ops.namespace
    assert torch.equal(*outs) != has_tiles


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("ahead", [16, 128])
def test_prefetching_changes_no_bit(ops, cache, ahead):
    step = _step()
    before = ops.paged_attention(*step.arguments)
    kernel_tuning.apply(ops.build.library, replace(AMX, prefetch=cache, prefetch_kib=ahead))
    after = ops.paged_attention(*step.arguments)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("rows", [1, 8, 16, 29, 70])
@pytest.mark.parametrize("kind", ["packed", "float32", "bf16-widen"])
def test_prefetching_weights_changes_no_bit(ops, kind, rows):
    torch.manual_seed(0)
    weight = torch.randn(208, 64).bfloat16()
    input = torch.randn(rows, 64).to(torch.float32 if kind in ("float32", "bf16-widen") else weight)
    pack = packed_linear.pack_bf16 if kind == "bf16-widen" else packed_linear.pack
    packed = pack(weight.to(input))
    outs = []
    for cache in CACHES:
        prefetches = {"linear_prefetch": cache, "linear_prefetch_once": cache}
        kernel_tuning.apply(ops.build.library, replace(AMX, **prefetches))
        outs.append(ops.packed_linear(input, packed))
    assert torch.equal(*outs)


def test_other_dot_products_are_other_sums():
    ops, step = loaded(WITHOUT_AMX, plain_tiles=True), _step()
    amx, _ = ops.paged_attention(*step.arguments)
    with tuned(ops, prefill="float32"):
        floats, _ = ops.paged_attention(*step.arguments)
    few = slice(0, 1)
    assert torch.equal(amx[few], floats[few]) and not torch.equal(amx, floats)


def test_a_saved_tuning_is_read(tmp_path):
    library = tmp_path / "library.so"
    tuning = KernelTuning("float32", "amx", "bf16-dot", "L1", 64)
    result = TuningResult(tuning, {"decode float32": 1.3})
    assert kernel_tuning.read(library, "amx_bf16") is None
    kernel_tuning.write(library, result)
    assert kernel_tuning.read(library, "amx_bf16") == result
    assert kernel_tuning.read(library, "avx512_bf16") is None  # it has no tiles


GOOD = {"tuning": asdict(KernelTuning.default("avx2")), "ratios": {}}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null",
        *(json.dumps(GOOD | {part: other}) for part in GOOD for other in (None, [1], "x")),
        json.dumps(GOOD | {"tuning": {"decode": 3}}),
        json.dumps(GOOD | {"ratios": {"decode": "x"}}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored(tmp_path, text):
    library = tmp_path / "library.so"
    kernel_tuning_file(library).write_text(text)
    assert kernel_tuning.read(library, "avx2") is None
