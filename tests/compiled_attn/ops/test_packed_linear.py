"""Linear layers of packed weights against float64 products, with every kernel of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from compiled_attn.ops import NativeOps, load, packed_linear
from tests.compiled_attn.ops.kernels import AMX, BEST, SLOW, WITHOUT_AMX, loaded, threads
from tests.compiled_attn.ops.packed_layers import (
    KINDS,
    ROWS,
    SIZES,
    assert_product,
    bf16_weights_by,
    layer,
    packed_as,
)


@pytest.fixture(
    params=[
        "reference",
        BEST,
        "tiles in plain C++",
        *(["bf16-widen in tiles"] if BEST == AMX else []),
        *SLOW,
    ],
    scope="module",
)
def ops(request) -> Iterator[NativeOps]:
    if request.param == "reference":
        yield load("reference")
        return
    is_plain, in_tiles = request.param == "tiles in plain C++", "tiles" in request.param
    isa = WITHOUT_AMX if is_plain else BEST if in_tiles else request.param
    with bf16_weights_by(
        "amx" if in_tiles else "float32", loaded(isa, plain_tiles=is_plain)
    ) as kernels:
        yield kernels


@pytest.mark.parametrize("rows", [1, 16])
def test_sums_are_rounded_to_the_nearest_bfloat16_and_ties_to_even(ops, rows):
    """Each output is one product, which float32 holds exactly: many lie between two bfloat16."""
    chance = torch.Generator().manual_seed(0)
    digits = torch.randint(128, 256, (rows, 32), generator=chance)
    signs = torch.randint(0, 2, (rows, 32), generator=chance) * 2 - 1
    input = (
        digits * signs * 2.0 ** torch.randint(-120, 100, (rows, 32), generator=chance)
    ).bfloat16()
    diagonal = torch.randint(64, 128, (32,), generator=chance).float()
    weight = packed_linear.pack(torch.diag(diagonal).bfloat16())
    exact = input.double() * diagonal.double()
    assert torch.equal(ops.packed_linear(input, weight), exact.bfloat16())


def test_what_is_too_large_for_bfloat16_is_infinite_and_nan_stays_nan(ops):
    weight = packed_linear.pack(torch.ones(16, 32).bfloat16())
    input = torch.zeros(4, 32).bfloat16()
    input[0, :2] = torch.tensor([3.39e38, 1e36])
    input[1, 3], input[2, 5] = torch.nan, -torch.inf
    out = ops.packed_linear(input, weight)
    assert (out[0] == torch.inf).all() and out[1].isnan().all() and (out[2] == -torch.inf).all()
    assert (out[3] == 0).all()


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_product_in_float64(ops, kind, outputs, inputs):
    for rows in ROWS:
        input, weight, bias = layer(rows, outputs, inputs, kind=kind)
        packed = packed_as(kind, weight)
        assert_product(ops.packed_linear(input, packed), input, weight)
        assert_product(ops.packed_linear(input, packed, bias), input, weight, bias)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_bf16_weights_give_the_bits_of_the_whole_weight(ops, outputs, inputs):
    for rows in ROWS:
        input, weight, bias = layer(rows, outputs, inputs, kind="bf16-widen")
        whole, widened = packed_linear.pack(weight), packed_linear.pack_bf16(weight)
        assert widened.nbytes * 2 == whole.nbytes
        out, expected = (ops.packed_linear(input, each, bias) for each in (widened, whole))
        if ops.build is None:  # MKL's bits depend on where a matrix lies
            torch.testing.assert_close(out, expected)
        else:
            with bf16_weights_by("float32", ops):
                assert torch.equal(ops.packed_linear(input, widened, bias), expected)
            assert_product(out, input, weight, bias)


def test_every_half_counts_as_what_it_is(ops):
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    weight = bits.view(torch.bfloat16).float().view(-1, 32)
    if ops.build is not None:  # the kernels read subnormals as zeros
        weight[weight.abs() < torch.finfo(torch.float32).tiny] = 0
    widened = packed_linear.pack_bf16(weight)
    assert torch.equal(packed_linear.unpack(widened).view(torch.int32), weight.view(torch.int32))
    finite = weight.isfinite().all(1)
    out = ops.packed_linear(torch.eye(32), packed_linear.pack_bf16(weight[finite][:1008]))
    assert torch.equal(out, weight[finite][:1008].T)


def test_all_bits_of_a_float_are_multiplied(ops):
    bits = torch.randint(-(1 << 31), 1 << 31, (64, 32), generator=torch.Generator().manual_seed(0))
    values = bits.int().view(torch.float32)
    greatest, least = torch.finfo(torch.float32).max, 2.0**-126
    inside = values.isfinite() & (values.abs() > 2.0**-102)  # less has subnormal parts
    values = torch.where(inside, values, 1 / 3)
    values[:4] = torch.tensor([0.0, greatest, -greatest, least])[:, None]
    packed = packed_linear.pack_bf16(torch.eye(32))
    assert torch.equal(ops.packed_linear(values, packed), values)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, "signalling"])
def test_what_is_not_finite_stays_what_it_is(ops, value):
    input = torch.ones(3, 32)
    if value == "signalling":  # the upper half alone is that of infinity
        input.view(torch.int32)[1, 5], value = 0x7F800001, torch.nan
    else:
        input[1, 5] = value
    out = ops.packed_linear(input, packed_linear.pack_bf16(torch.ones(16, 32)))
    expected = torch.full((3, 16), 32.0)
    expected[1] = value
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "weight",
    [
        torch.full((16, 32), 1 + 2**-8),
        torch.zeros(16, 32).bfloat16(),
        torch.zeros(16, 24),
        torch.zeros(16, 32).double(),
    ],
)
def test_other_weights_do_not_fit_bf16(weight):
    assert not packed_linear.fits_bf16(weight)
    with pytest.raises(ValueError, match=r"exact in bfloat16, got torch\..*\[16, "):
        packed_linear.pack_bf16(weight)


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "bf16-widen"])
def test_rows_of_the_input_may_lie_apart(ops, kind):
    input, weight, _ = layer(20, 64, 192, kind=kind)
    part, weight = input[::2, 64:128], weight[:, :64]
    assert_product(ops.packed_linear(part, packed_as(kind, weight)), part, weight)


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "bf16-widen"])
def test_no_inputs_are_the_bias(ops, kind):
    input, _, bias = layer(5, 32, 0, kind=kind)
    dtype = torch.int16 if kind == "bf16-widen" else input.dtype
    packed = torch.empty(2, 0, 16, 1 if kind == "float32" else 2, dtype=dtype)
    assert torch.equal(ops.packed_linear(input, packed, bias), bias.expand(5, 32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(ops, poison, kind):
    input, weight, _ = layer(40, 48, 64, kind=kind)
    packed = packed_as(kind, weight)
    clean = ops.packed_linear(input, packed)
    input[17, 5] = poison
    poisoned = ops.packed_linear(input, packed)
    others = torch.arange(40) != 17
    assert torch.equal(poisoned[others], clean[others])
    assert not poisoned[17].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 300])
def test_the_number_of_threads_changes_no_bit(ops, rows, kind):
    input, weight, bias = layer(rows, 16 * 40, 96, kind=kind)
    packed = packed_as(kind, weight)
    with threads(1):
        alone = ops.packed_linear(input, packed, bias)
    with threads(3):
        assert torch.equal(ops.packed_linear(input, packed, bias), alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [96, 576])
def test_the_number_of_rows_changes_no_bit(ops, kind, inputs):
    if not ops.build:
        pytest.skip("torch's own sums may differ with the number of rows")
    input, gate, bias = layer(300, 16 * 13, inputs, kind=kind)
    packed = [packed_as(kind, each) for each in (gate, gate.flip(0))]
    calls = {
        "one": lambda x: ops.packed_linear(x, packed[0], bias),
        "several": lambda x: torch.cat(ops.packed_linears(x, packed), 1),
        "gated": lambda x: ops.packed_swiglu(x, packed),
    }
    for name, call in calls.items():
        with threads(2):
            whole = call(input)
        for rows in (
            *range(1, 34),
            *range(47, 51),
            *range(63, 67),
            *range(95, 99),
            *range(127, 131),
        ):
            with threads(1 + rows % 2):
                assert torch.equal(call(input[-rows:]), whole[-rows:]), (name, rows)


BIASED_ROWS = [(0, False), (1, True), (1, False), (5, True), (40, False), (300, True)]


@pytest.mark.parametrize(("rows", "biased"), BIASED_ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [(48, 16, 208), (16 * 40, 16, 16)])
def test_layers_at_once_give_the_bits_that_each_gives_alone(ops, outputs, rows, kind, biased):
    input = layer(rows, 16, 96, kind=kind)[0]
    random = [layer(1, each, 96, seed=each, kind=kind)[1:] for each in outputs]
    packed = [packed_as(kind, weight) for weight, _ in random]
    biases = [bias if biased else None for _, bias in random]
    layers = [*zip(packed, biases, strict=True)]
    alone = [ops.packed_linear(input, *each) for each in layers]
    for count in (1, 3):
        with threads(count):
            if not ops.build:  # torch's own sums may differ with the number of threads
                alone = [ops.packed_linear(input, *each) for each in layers]
            at_once = ops.packed_linears(input, packed, biases if biased else [])
            assert all(torch.equal(*pair) for pair in zip(at_once, alone, strict=True))


@pytest.mark.parametrize(("rows", "biased"), BIASED_ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [16, 208])
def test_a_gate_is_silu_of_one_layer_times_the_other(ops, outputs, rows, kind, biased):
    input = layer(rows, 16, 96, kind=kind)[0]
    random = [layer(1, outputs, 96, seed=seed, kind=kind)[1:] for seed in (3, 4)]
    packed = [packed_as(kind, weight) for weight, _ in random]
    biases = [bias for _, bias in random] if biased else []
    gate, up = (each.double() for each in ops.packed_linears(input, packed, biases))
    expected = gate * torch.sigmoid(gate) * up
    alone = ops.packed_swiglu(input, packed, biases)
    rounding = 2**-8 if input.dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(alone.double(), expected, rtol=rounding, atol=1e-6)
    assert alone.dtype is input.dtype
    if ops.build:  # torch's own sums may differ with the number of threads
        with threads(3):
            assert torch.equal(ops.packed_swiglu(input, packed, biases), alone)


@pytest.mark.parametrize(
    "value", [0.0, 90.0, 3e38, -87.2, -90.0, -3e38, torch.inf, -torch.inf, torch.nan]
)
def test_a_gate_that_is_as_great_as_can_be(ops, value):
    input, one = torch.zeros(3, 32), packed_linear.pack(torch.zeros(16, 32))
    bias = torch.full((16,), value)
    out = ops.packed_swiglu(input, [one, one], [bias, torch.ones(16)])
    expected = functional.silu(torch.full((3, 16), value))
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=2e-36, equal_nan=True)
    assert expected.isnan().all() or torch.equal(out.signbit(), expected.signbit())


@pytest.mark.parametrize("kind", KINDS)
def test_the_op_gives_rows_of_a_packed_weight(ops, kind):
    _, weight, _ = layer(1, 48, 96, kind=kind)
    packed = packed_as(kind, weight)
    ids = torch.tensor([0, 17, 47, 5, 5, 31])
    assert torch.equal(ops.packed_rows(packed, ids), packed_linear.unpack(packed)[ids])
    assert ops.packed_rows(packed, ids[:0]).shape == (0, 96)
