"""Layers of quantised weights against float64 products, with every kernel of this machine."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.ops import NativeOps, load, quantised_linear
from compiled_attn.ops.quantised_linear import BITS, QuantisedWeight, quantise, round_inputs
from tests.compiled_attn.ops.kernels import AMX, BEST, SLOW, WITHOUT_AMX, loaded, threads, tuned
from tests.compiled_attn.ops.quantised_layers import FORMATS, arguments, quantised_layer

ROWS = [1, 7, 8, 9, 33]
TILES = "tiles in plain C++"
MODES = {"w4a16": False, "w4a8": True}
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(params=["reference", BEST, TILES, *SLOW], scope="module")
def ops(request) -> NativeOps:
    if request.param == TILES:
        return loaded(WITHOUT_AMX, plain_tiles=True)
    return load("reference") if request.param == "reference" else loaded(request.param)


def inputs_of(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)


def assert_product(out, input, exact, bias=None, weight_rounding=0.0) -> None:
    """Against the product in float64."""
    expected = input.double() @ exact.T + (0 if bias is None else bias.double())
    # The middle of the codes is subtracted from sums, which are up to 16 times larger.
    size = input.double().abs() @ (exact.abs() + exact.abs().amax(1, keepdim=True)).T
    rounding = 2**-8 if input.dtype is torch.bfloat16 else 0
    assert out.dtype is input.dtype
    off = (out.double() - expected).abs()
    assert (off <= expected.abs() * rounding + size * (4e-6 + weight_rounding)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_layer_is_the_product_in_float64(ops, form, dtype):
    weight, exact = quantised_layer(form, 80, 512)
    bias = torch.randn(80).to(dtype)
    in_tiles = dtype is torch.bfloat16 and (ops.isa == AMX or "plain_tiles" in ops.namespace)
    for rows in ROWS:
        input = inputs_of(rows, 512, dtype)
        out = ops.quantised_linear(input, *arguments(weight), bias)
        assert_product(out, input, exact, bias, 2**-9 if in_tiles else 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_int8_inputs_that_need_no_rounding_give_the_product(ops, form, dtype):
    weight, exact = quantised_layer(form, 48, 512)
    chance = torch.Generator().manual_seed(0)
    input = torch.randint(-127, 128, (9, 16, 32), generator=chance).float()
    input[:, :, 5] = 127  # the scale is a power of two
    input = (input * 2.0 ** torch.randint(-3, 4, (9, 16, 1), generator=chance)).flatten(1)
    out = ops.quantised_linear(input.to(dtype), *arguments(weight), None, True)
    assert_product(out, input.to(dtype), exact)


@pytest.mark.parametrize("form", ["Q4_1", "Q6_K"])
def test_int8_inputs_are_rounded_by_half_a_step_at_most(ops, form):
    weight, exact = quantised_layer(form, 48, 512)
    input = inputs_of(9, 512, torch.float32)
    step = input.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) / 127
    assert ((round_inputs(input) - input).abs() <= step * 0.50001).all()
    out = ops.quantised_linear(input, *arguments(weight), None, True)
    bound = step.double() @ exact.abs().T * 0.501
    assert ((out.double() - input.double() @ exact.T).abs() <= bound).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_row_has_its_bits_whatever_is_next_to_it_and_whoever_computes_it(ops, form, dtype, mode):
    if ops.build is None:
        pytest.skip("torch's own sums may differ with the number of rows")
    weight, _ = quantised_layer(form, 16 * 40, 512)
    input = inputs_of(300, 512, dtype)
    call = lambda x: ops.quantised_linear(x, *arguments(weight), None, MODES[mode])  # noqa: E731
    with threads(1):
        whole = call(input)
    with threads(3):
        assert torch.equal(call(input), whole)
    for begin, end in ((0, 1), (299, 300), (5, 12), (0, 9), (256, 300)):
        assert torch.equal(call(input[begin:end]), whole[begin:end])


@pytest.mark.parametrize("form", FORMATS)
def test_int8_inputs_have_the_same_bits_in_tiles_and_in_registers(form):
    """Sums of a group are exact integers."""
    weight, _ = quantised_layer(form, 80, 512)
    input = inputs_of(50, 512, torch.bfloat16)
    for ops in (loaded(BEST), loaded(WITHOUT_AMX, plain_tiles=True)):
        outs = []
        for products in ("amx", "float32"):
            with tuned(ops, linear=products):
                outs.append(ops.quantised_linear(input, *arguments(weight), None, True))
        assert torch.equal(*outs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(ops, poison, mode):
    weight, _ = quantised_layer("Q4_0", 48, 64)
    input = inputs_of(40, 64, torch.bfloat16)
    call = lambda: ops.quantised_linear(input, *arguments(weight), None, MODES[mode])  # noqa: E731
    clean = call()
    input[17, 5] = poison
    poisoned = call()
    others = torch.arange(40) != 17
    assert torch.equal(poisoned[others], clean[others])
    assert not poisoned[17].isfinite().any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_layers_at_once_give_the_bits_that_each_gives_alone(ops, rows, biased, mode):
    input, int8 = inputs_of(rows, 512, torch.bfloat16), MODES[mode]
    forms = [("Q4_K", 48), ("Q4_K", 16), ("Q6_K", 208)]
    layers = [arguments(quantised_layer(form, outputs, 512)[0]) for form, outputs in forms]
    biases = [torch.randn(outputs).bfloat16() for _, outputs in forms] if biased else []
    for count in (1, 3):
        with threads(count):
            alone = [
                ops.quantised_linear(input, *layer, biases[i] if biased else None, int8)
                for i, layer in enumerate(layers)
            ]
            at_once = ops.quantised_linears(
                input, *map(list, zip(*layers, strict=True)), biases, int8
            )
            assert all(torch.equal(*pair) for pair in zip(at_once, alone, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_gate_is_silu_of_one_layer_times_the_other(ops, rows, dtype, mode):
    input = inputs_of(rows, 96, dtype)
    layers = [arguments(quantised_layer("Q4_1", 208, 96, seed)[0]) for seed in (3, 4)]
    lists = [*map(list, zip(*layers, strict=True))]
    gate, up = (each.double() for each in ops.quantised_linears(input, *lists, [], MODES[mode]))
    out = ops.quantised_swiglu(input, *lists, [], MODES[mode])
    rounding = 2**-8 if dtype is torch.bfloat16 else 1e-6
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=1e-6)
    assert out.dtype is dtype


@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_a_weight_are_its_numbers(ops, form):
    weight, exact = quantised_layer(form, 48, 512)
    ids = torch.tensor([0, 17, 47, 5, 5])
    rows = ops.quantised_rows(*arguments(weight), ids, False)
    size = exact.abs().amax(1)[ids, None]
    assert ((rows.double() - exact[ids]).abs() <= size * 2e-6).all()
    rounded = ops.quantised_rows(*arguments(weight), ids, True)
    assert torch.equal(rounded, rows.bfloat16())


def test_rows_that_a_weight_does_not_have_are_refused():
    weight = arguments(quantised_layer("Q4_0", 48, 64)[0])
    for bad in (-1, 48):
        with pytest.raises(RuntimeError, match=f"expected ids in 0..47, got {bad}: look up rows"):
            loaded(BEST).quantised_rows(*weight, torch.tensor([3, bad]), False)


@pytest.mark.parametrize("form", FORMATS)
def test_dequantised_weights_are_their_numbers(form):
    weight, exact = quantised_layer(form, 48, 512)
    assert weight.shape == (48, 512) and weight.bits == FORMATS[form][0]
    size = exact.abs().amax(1, keepdim=True)
    assert ((weight.dequantise().double() - exact).abs() <= size * 2e-6).all()


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_within_half_a_step_of_the_weight(bits):
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=chance) * torch.logspace(-9, 3, 48)[:, None]
    weight[3] = 0
    size = 96 if bits == 8 else 32
    packed, groups = quantise(weight, bits), weight.unflatten(1, (-1, size)).double()
    off = (packed.dequantise().unflatten(1, (-1, size)) - groups).abs()
    step = groups.abs().amax(2, keepdim=True) / (1 << (bits - 1))
    # The other end of the range has one code less; scales are rounded to float16.
    assert (off <= step * (1 + 2**-9 * (1 << bits))).all()
    assert (off.mean() <= step.mean() * 0.3) and (packed.dequantise()[3] == 0).all()


def test_weights_that_are_not_finite_are_refused():
    weight = torch.ones(16, 32)
    weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match="expected a weight of finite numbers"):
        quantise(weight, 4)


@pytest.mark.parametrize(
    ("codes", "bits", "scales", "message"),
    [
        ((16, 48), 4, (16, 1), "codes .*48"),
        ((24, 64), 4, (24, 1), "codes .*24"),
        ((16, 64), 7, (16, 1), "of 7"),
        ((16, 96), 4, (16, 2), "expected scales of groups .* divide 96, got 2"),
    ],
)
def test_sizes_that_cannot_be_packed_are_refused(codes, bits, scales, message):
    with pytest.raises(ValueError, match=message):
        QuantisedWeight.pack(torch.zeros(codes).byte(), bits, torch.ones(scales).half())


INPUT, WEIGHT = torch.zeros(3, 64), QuantisedWeight.pack(
    torch.zeros(32, 64).byte(), 4, torch.ones(32, 2).half()
)  # fmt: skip
BAD = [
    ({"input": INPUT.half()}, "input: BFloat16, got Half"),
    ({"input": INPUT[:, :32]}, r"input: \[any, 64\]"),
    ({"codes": WEIGHT.codes[:, :, :192].contiguous()}, "codes of 4, 5, 6 or 8 bits"),
    ({"codes": WEIGHT.codes.char()}, "codes: Byte, got Char"),
    ({"scales": WEIGHT.scales.bfloat16()}, "scales: Half, got BFloat16"),
    ({"scales": WEIGHT.scales[:1]}, r"scales: \[2, 2, 16\]"),
    ({"scales": torch.ones(2, 3, 16)}, "scales of groups of 16, .*of 64, got 3 groups"),
    ({"steps": torch.ones(2, 1, 16).byte()}, "steps that divide the 2 groups"),
    ({"steps": torch.ones(2, 2, 16)}, "steps: Char, got Float"),
    ({"bias": torch.zeros(16)}, r"bias: \[32\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_wrong_tensors_are_refused(change, message):
    names = ("codes", "scales", "steps")
    good = {"input": INPUT, **dict(zip(names, arguments(WEIGHT), strict=True))}
    with pytest.raises(RuntimeError, match=f"quantised_linear: expected .*{message}"):
        loaded(BEST).quantised_linear(**{**good, **change})


@pytest.mark.parametrize("form", ["Q4_0", "Q4_K"])
def test_torch_finds_nothing_wrong_with_the_ops(form):
    layer, input = arguments(quantised_layer(form, 48, 512)[0]), inputs_of(5, 512, torch.bfloat16)
    lists = [*([each] * 2 for each in layer)]
    load()
    own = torch.ops.compiled_attn
    for op, given in (
        (own.quantised_linear, (input, *layer, torch.zeros(48).bfloat16(), True)),
        (own.quantised_linears, (input, *lists, [], False)),
        (own.quantised_swiglu, (input, *lists, [], False)),
        (own.quantised_rows, (*layer, torch.tensor([3, 40]), True)),
    ):
        utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(op.default, given, test_utils=utils)


def test_the_reference_serves_without_a_compiler():
    weight, exact = quantised_layer("Q6_K", 48, 512)
    input = inputs_of(3, 512, torch.float32)
    assert_product(quantised_linear.reference(input, *arguments(weight)), input, exact)
