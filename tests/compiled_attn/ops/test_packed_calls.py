"""Calls of the ops of packed layers: argument errors, opcheck, packing."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.ops import available_isas, load, packed_linear
from tests.compiled_attn.ops.kernels import AMX, BEST, WITHOUT_AMX, loaded
from tests.compiled_attn.ops.packed_layers import KINDS, ROWS, halves_by, layer, packed_as


def test_the_registers_give_the_bits_of_plain_tiles():
    if AMX not in available_isas():
        pytest.skip("this processor has no AMX")
    both = loaded(AMX), loaded(WITHOUT_AMX, plain_tiles=True)
    for kind in ("bfloat16", "int8", "halves"):
        for rows in ROWS:
            input, weight, bias = layer(rows, 80, 96, seed=rows, kind=kind)
            packed, scale = packed_as(kind, weight)
            outs = []
            for each in both:
                with halves_by("amx", each):
                    outs.append(each.packed_linear(input, packed, bias, scale))
            assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.zeros(3, 64)}, "input: BFloat16, got Float"),
        ({"input": torch.zeros(3, 32).bfloat16()}, r"input: \[any, 64\], got \[3, 32\]"),
        ({"input": torch.zeros(64).bfloat16()}, r"input: \[any, 64\], got \[64\]"),
        ({"input": torch.zeros(64, 3).bfloat16().T}, "last stride 1"),
        ({"weight": torch.zeros(2, 16, 32).bfloat16()}, r"weight: \[any, any, 16, 2\]"),
        ({"weight": torch.zeros(2, 24, 16, 2).bfloat16()}, "a multiple of 32 inputs, got 48"),
        ({"weight": torch.zeros(2, 32, 16, 2)}, r"weight: \[any, any, 16, 1\]"),
        ({"weight": torch.zeros(2, 64, 16, 1)}, "input: Float, got BFloat16"),
        ({"weight": torch.zeros(2, 32, 16, 2).short()}, "input: Float, got BFloat16"),
        ({"weight": torch.zeros(2, 64, 16, 1).short()}, r"weight: \[any, any, 16, 2\]"),
        ({"bias": torch.zeros(16).bfloat16()}, r"bias: \[32\], got \[16\]"),
        ({"weight": torch.zeros(2, 32, 16, 2).char()}, "weight: BFloat16, got Char"),
        ({"scale": torch.ones(32)}, "weight: Char, got BFloat16"),
        (
            {"weight": torch.zeros(2, 32, 16, 2).char(), "scale": torch.ones(16)},
            r"scale: \[32\], got \[16\]",
        ),
    ],
)
def test_wrong_tensors_are_refused(change, message):
    ops = loaded(BEST)
    good = {"input": torch.zeros(3, 64).bfloat16(), "weight": torch.zeros(2, 32, 16, 2).bfloat16()}
    with pytest.raises(RuntimeError, match=f"packed_linear: expected .*{message}"):
        ops.packed_linear(**{**good, **change})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": []}, "weights of at least one layer, got none"),
        ({"biases": [torch.zeros(32).bfloat16()]}, "biases of all weights or of none, got 1 for 2"),
        ({"scales": [torch.ones(32)] * 3}, "scales of all weights or of none, got 3 for 2"),
        (
            {"weights": [torch.zeros(2, 32, 16, 2).to(t) for t in (torch.bfloat16, torch.short)]},
            "weights: BFloat16, got Short",
        ),
        (
            {"weights": [torch.zeros(2, 16, 16, 2).bfloat16()] * 2},
            r"input: \[any, 32\], got \[3, 64",
        ),
    ],
)
def test_wrong_lists_are_refused(given, message):
    ops = loaded(BEST)
    good = {"weights": [torch.zeros(2, 32, 16, 2).bfloat16()] * 2}
    with pytest.raises(RuntimeError, match=f"packed_linears: expected .*{message}"):
        ops.packed_linears(torch.zeros(3, 64).bfloat16(), **{**good, **given})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([2], "the weights of gate and up, got 1"),
        ([2, 1], "as many outputs as the gate, 32, got 16"),
    ],
)
def test_what_is_no_gate_is_refused(sizes, message):
    weights = [torch.zeros(size, 32, 16, 2).bfloat16() for size in sizes]
    with pytest.raises(RuntimeError, match=f"packed_swiglu: expected {message}"):
        loaded(BEST).packed_swiglu(torch.zeros(3, 64).bfloat16(), weights)


@pytest.mark.parametrize("op", ["packed_linears", "packed_swiglu"])
def test_torch_finds_nothing_wrong_with_layers_at_once(op):
    input, weight, bias = layer(5, 32, 64)
    load()
    torch.library.opcheck(
        getattr(torch.ops.compiled_attn, op).default,
        (input, [packed_linear.pack(weight)] * 2, [bias, bias], []),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_torch_finds_nothing_wrong_with_the_op(kind):
    input, weight, bias = layer(5, 32, 64, kind=kind)
    packed, scale = packed_as(kind, weight)
    load()
    torch.library.opcheck(
        torch.ops.compiled_attn.packed_linear.default,
        (input, packed, bias, scale),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("bfloat16", (3, 48, 16, 2)), ("float32", (3, 96, 16, 1)), ("halves", (3, 48, 16, 2))],
)
def test_unpacking_gives_the_weight_and_rows_of_it_back(kind, shape):
    _, weight, _ = layer(1, 48, 96, kind=kind)
    packed, _ = packed_as(kind, weight)
    assert packed.shape == shape and packed_linear.is_packed(packed)
    assert not packed_linear.is_packed(packed.double())
    assert torch.equal(packed_linear.unpack(packed), weight)
    ids = torch.tensor([[0, 17, 47], [5, 5, 31]])
    assert torch.equal(packed_linear.rows(packed, ids), weight[ids])


@pytest.mark.parametrize("bad", [-1, 48])
def test_rows_that_a_weight_does_not_have_are_refused(bad):
    packed = packed_linear.pack(layer(1, 48, 96)[1])
    with pytest.raises(RuntimeError, match=rf"expected ids in 0..47, got {bad}: look up rows"):
        loaded(BEST).packed_rows(packed, torch.tensor([3, bad]))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_an_op_of_torch(kind):
    load(strict=True)
    packed, _ = packed_as(kind, layer(1, 48, 96, kind=kind)[1])
    torch.library.opcheck(
        torch.ops.compiled_attn.packed_rows.default,
        (packed, torch.tensor([3, 40])),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(32, 64).half(),
        torch.zeros(24, 64).bfloat16(),
        torch.zeros(24, 64),
        torch.zeros(32, 48).bfloat16(),
        torch.zeros(32).bfloat16(),
        torch.zeros(32, 64, device="meta").bfloat16(),
    ],
)
def test_other_weights_stay_as_they_are(weight):
    assert not packed_linear.can_pack(weight)
    with pytest.raises(ValueError, match="leave it as it is"):
        packed_linear.pack(weight)
