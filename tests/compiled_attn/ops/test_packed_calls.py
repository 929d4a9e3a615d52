"""Calls of the ops of packed layers: argument errors, opcheck, packing."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.ops import available_isas, load, packed_linear
from tests.compiled_attn.ops.kernels import AMX, BEST, WITHOUT_AMX, loaded, tuned
from tests.compiled_attn.ops.packed_layers import KINDS, ROWS, layer, packed_as


def test_the_registers_give_the_bits_of_plain_tiles():
    if AMX not in available_isas():
        pytest.skip("this processor has no AMX")
    both = loaded(AMX), loaded(WITHOUT_AMX, plain_tiles=True)
    for kind in ("bfloat16", "bf16-widen"):
        for rows in ROWS:
            input, weight, bias = layer(rows, 80, 96, seed=rows, kind=kind)
            packed = packed_as(kind, weight)
            outs = []
            for each in both:
                with tuned(each, linear="amx", linear_bf16_weights="amx"):
                    outs.append(each.packed_linear(input, packed, bias))
            assert torch.equal(*outs)


INPUT, WEIGHT = torch.zeros(3, 64).bfloat16(), torch.zeros(2, 32, 16, 2).bfloat16()
BAD = [
    ("linear", {"input": INPUT.float()}, ".*input: BFloat16, got Float"),
    ("linear", {"input": INPUT[:, :32]}, r".*input: \[any, 64\], got \[3, 32\]"),
    ("linear", {"input": INPUT[0]}, r".*input: \[any, 64\], got \[64\]"),
    ("linear", {"input": torch.zeros(64, 3).bfloat16().T}, ".*last stride 1"),
    ("linear", {"weight": torch.zeros(2, 16, 32).bfloat16()}, r".*weight: \[any, any, 16, 2\]"),
    ("linear", {"weight": WEIGHT[:, :24].contiguous()}, ".*a multiple of 32 inputs, got 48"),
    ("linear", {"weight": WEIGHT.float()}, r".*weight: \[any, any, 16, 1\]"),
    ("linear", {"weight": torch.zeros(2, 64, 16, 1)}, ".*input: Float, got BFloat16"),
    ("linear", {"weight": WEIGHT.short()}, ".*input: Float, got BFloat16"),
    ("linear", {"weight": torch.zeros(2, 64, 16, 1).short()}, r".*weight: \[any, any, 16, 2\]"),
    ("linear", {"bias": torch.zeros(16).bfloat16()}, r".*bias: \[32\], got \[16\]"),
    ("linear", {"weight": WEIGHT.char()}, ".*weight: BFloat16, got Char"),
    ("linears", {"weights": []}, "weights of at least one layer, got none"),
    ("linears", {"biases": [WEIGHT[0, :, 0, 0]]}, "biases of all weights or of none, got 1"),
    ("linears", {"weights": [WEIGHT, WEIGHT.short()]}, "weights: BFloat16, got Short"),
    ("linears", {"weights": [WEIGHT[:, :16].contiguous()] * 2}, r"input: \[any, 32\], got \[3, 64"),
    ("swiglu", {"weights": [WEIGHT]}, "the weights of gate and up, got 1"),
    ("swiglu", {"weights": [WEIGHT, WEIGHT[:1]]}, "as many outputs as the gate, 32, got 16"),
]


@pytest.mark.parametrize(("op", "change", "message"), BAD)
def test_wrong_tensors_are_refused(op, change, message):
    good = {"input": INPUT} | ({"weight": WEIGHT} if op == "linear" else {"weights": [WEIGHT] * 2})
    with pytest.raises(RuntimeError, match=f"packed_{op}: expected {message}"):
        getattr(loaded(BEST), f"packed_{op}")(**{**good, **change})


@pytest.mark.parametrize("op", ["packed_linear", "packed_rows", "packed_linears", "packed_swiglu"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_finds_nothing_wrong_with_the_ops(op, kind):
    input, weight, bias = layer(5, 48, 64, kind=kind)
    packed = packed_as(kind, weight)
    arguments = {
        "packed_linear": (input, packed, bias),
        "packed_rows": (packed, torch.tensor([3, 40])),
    }.get(op, (input, [packed] * 2, [bias] * 2))
    load()
    torch.library.opcheck(
        getattr(torch.ops.compiled_attn, op).default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("bfloat16", (3, 48, 16, 2)), ("float32", (3, 96, 16, 1)), ("bf16-widen", (3, 48, 16, 2))],
)
def test_unpacking_gives_the_weight_and_rows_of_it_back(kind, shape):
    _, weight, _ = layer(1, 48, 96, kind=kind)
    packed = packed_as(kind, weight)
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
