"""Forms of the kernels: which there are, what is kept of them, that each is right."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from compiled_attn.ops import NativeOps, NativeUnavailable, available_isas, load, packed_linear
from compiled_attn.ops.cpu.build import find_compiler
from compiled_attn.ops.cpu.forms import (
    CACHES,
    Chosen,
    Forms,
    keep,
    kept,
    products_of,
    products_of_halves,
    take,
)
from compiled_attn.ops.cpu.isa import ISAS
from compiled_attn.ops.cpu.libraries import forms_of
from tests.compiled_attn.ops.native_scene import Scene, assert_right, scene

BEST = available_isas()[0]
REQUESTS = [(1, 300), (40, 300), (2, 70)]


@pytest.fixture(params=[False, True], ids=["of this processor", "tiles in plain C++"])
def ops(request) -> Iterator[NativeOps]:
    try:
        find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    without = next(isa for isa in available_isas() if isa != "amx_bf16")
    ops = load(without, plain_tiles=True) if request.param else load(BEST)
    yield ops
    take(ops.build.library, Forms.of("amx_bf16"))  # as it began


def _step() -> Scene:
    return scene(REQUESTS, dtype=torch.bfloat16, heads=8, kv_heads=2)


@pytest.mark.parametrize("isa", ISAS)
def test_the_best_guess_is_of_what_the_instruction_set_has(isa):
    assert Forms.of(isa).serves(isa)
    assert products_of(isa)[-1] == "floats"


def test_tiles_need_amx_and_pairs_their_dot_products():
    assert products_of("amx_bf16") == ["tiles", "pairs", "floats"]
    assert products_of("avx512_bf16") == ["pairs", "floats"]
    assert products_of("avx512") == products_of("avx2") == products_of("neon") == ["floats"]
    assert Forms.of("amx_bf16") == Forms("pairs", "tiles", "tiles", "L2", 32)
    assert not Forms("tiles", "tiles", "tiles").serves("amx_bf16")
    assert not Forms("pairs", "tiles", "tiles", linear_asks="L3").serves("amx_bf16")
    assert not Forms("pairs", "tiles", "tiles", linear_asks_once="L3").serves("amx_bf16")
    assert not Forms("floats", "pairs", "floats").serves("avx512")
    assert products_of_halves("amx_bf16") == ["floats", "tiles"]
    assert products_of_halves("avx512_bf16") == products_of_halves("neon") == ["floats"]
    assert Forms("pairs", "tiles", "tiles", linear_halves="tiles").serves("amx_bf16")
    assert not Forms("pairs", "pairs", "pairs", linear_halves="tiles").serves("avx512_bf16")
    assert not Forms("pairs", "tiles", "tiles", linear_halves="pairs").serves("amx_bf16")


@pytest.mark.parametrize("products", ["tiles", "pairs", "floats"])
def test_attention_is_right_in_each_form(ops, products):
    few = "pairs" if products == "tiles" else products
    take(ops.build.library, Forms(few, products, products, "L1", 128))
    step = _step()
    assert_right(ops.paged_attention(*step.arguments, **step.options), step)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("products", ["tiles", "pairs", "floats"])
def test_linear_layers_are_right_in_each_form(ops, products, rows):
    take(ops.build.library, Forms("pairs", "tiles", products))
    torch.manual_seed(0)
    weight, input = torch.randn(96, 64).bfloat16(), torch.randn(rows, 64).bfloat16()
    out = ops.packed_linear(input, packed_linear.pack(weight))
    wanted = input.double() @ weight.double().T
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=2**-8)


def test_halves_in_tiles_are_other_sums(ops):
    torch.manual_seed(0)
    weight, input = torch.randn(96, 320).bfloat16().float(), torch.randn(40, 320)
    outs = []
    for products in ("floats", "tiles"):
        take(ops.build.library, Forms("pairs", "tiles", "tiles", linear_halves=products))
        outs.append(ops.packed_linear(input, packed_linear.halve(weight)))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-4)
    has_tiles = ops.isa == "amx_bf16" or ops.build.library != load(ops.isa).build.library
    assert torch.equal(*outs) != has_tiles


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("ahead", [16, 128])
def test_what_is_asked_for_changes_no_bit(ops, cache, ahead):
    step = _step()
    before = ops.paged_attention(*step.arguments)
    take(ops.build.library, Forms("pairs", "tiles", "tiles", cache, ahead))
    after = ops.paged_attention(*step.arguments)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("rows", [1, 8, 16, 29, 70])
@pytest.mark.parametrize("kind", ["packed", "float32", "halves", "int8"])
def test_where_weights_come_to_changes_no_bit(ops, kind, rows):
    torch.manual_seed(0)
    weight, scale = torch.randn(208, 64).bfloat16(), None
    input = torch.randn(rows, 64).to(torch.float32 if kind in ("float32", "halves") else weight)
    if kind == "int8":
        packed, scale = packed_linear.quantise(weight)
    elif kind == "packed":
        packed = packed_linear.pack(weight)
    else:
        packed = getattr(packed_linear, "halve" if kind == "halves" else "pack")(weight.float())
    outs = []
    for cache in CACHES:
        asks = {"linear_asks": cache, "linear_asks_once": cache}
        take(ops.build.library, Forms("pairs", "tiles", "tiles", **asks))
        outs.append(ops.packed_linear(input, packed, None, scale))
    assert torch.equal(*outs)


def test_other_products_are_other_sums():
    try:
        find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    without = next(isa for isa in available_isas() if isa != "amx_bf16")
    ops, step = load(without, plain_tiles=True), _step()
    tiles, _ = ops.paged_attention(*step.arguments)
    take(ops.build.library, Forms("pairs", "floats", "tiles"))
    floats, _ = ops.paged_attention(*step.arguments)
    take(ops.build.library, Forms.of("amx_bf16"))
    few = slice(0, 1)
    assert torch.equal(tiles[few], floats[few]) and not torch.equal(tiles, floats)


def test_what_is_kept_is_found_again(tmp_path):
    library = tmp_path / "library.so"
    chosen = Chosen(Forms("floats", "tiles", "pairs", "L1", 64), {"few_rows floats": 1.3})
    assert kept(library, "amx_bf16") is None
    keep(library, chosen)
    assert kept(library, "amx_bf16") == chosen
    assert kept(library, "avx512_bf16") is None  # it has no tiles


@pytest.mark.parametrize("part", ["forms", "ratios"])
@pytest.mark.parametrize("other", [None, [1], {"few_rows": 3}, {"asks": "L9"}, "x"])
def test_a_file_that_is_none_of_ours_counts_as_none(tmp_path, part, other):
    library = tmp_path / "library.so"
    keep(library, Chosen(Forms.of("avx2")))
    text = json.loads(forms_of(library).read_text()) | {part: other}
    forms_of(library).write_text(json.dumps(text))
    found = kept(library, "avx2")
    assert found is None or found.forms == Forms.of("avx2")
    assert found is None or part == "ratios"


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_file_that_is_no_table_counts_as_none(tmp_path, text):
    library = tmp_path / "library.so"
    forms_of(library).write_text(text)
    assert kept(library, "avx2") is None
