"""Linear layers with weights of 4 to 8 bits in Triton, interpreted, against float64 products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.ops import KernelArgumentError, NativeOps
from compiled_attn.ops.quantised_linear import QuantisedWeight
from tests.compiled_attn.ops.kernels import TRITON, interpreted, loaded
from tests.compiled_attn.ops.quantised_layers import arguments, quantised_layer
from tests.compiled_attn.ops.triton.counting import OTHERS, counted
from tests.compiled_attn.ops.triton.linear_cases import FORMATS, Case, assert_right
from tests.compiled_attn.ops.triton.test_launch import NoNumbers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return loaded(TRITON)


def computed(ops: NativeOps, case: Case) -> torch.Tensor:
    return ops.quantised_linear(*case.made()[0])


@pytest.mark.parametrize("int8_inputs", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_the_product_in_float64(ops, form, int8_inputs):
    for rows, dtype in ((1, torch.bfloat16), (17, torch.float32), (70, torch.float16)):
        case = Case(form, rows, 48, 512, dtype, True, int8_inputs)
        assert_right(computed(ops, case), case)


@settings(max_examples=18)
@given(
    case=st.builds(
        Case,
        form=st.sampled_from([*FORMATS]),
        rows=st.integers(1, 70) | st.sampled_from([8, 9, 16, 32, 33, 64, 65]),
        outputs=st.integers(1, 11).map(lambda panels: 16 * panels),
        inputs=st.sampled_from([256, 512, 768]),
        dtype=st.sampled_from(DTYPES),
        biased=st.booleans(),
        int8_inputs=st.booleans(),
        seed=st.integers(0, 1000),
    )
)
def test_random_layers_are_the_product_in_float64(case):
    assert_right(computed(interpreted(), case), case)


@pytest.mark.parametrize("inputs", [32, 96, 544])
@pytest.mark.parametrize("rows", [3, 40, 130])
def test_inputs_need_not_fill_tiles(ops, rows, inputs):
    for form in ("Q4_1", "Q8_0", "int8 by row"):
        case = Case(form, rows, 48, inputs)
        assert_right(computed(ops, case), case)


def test_no_rows_are_no_results(ops):
    assert computed(ops, Case(rows=0)).shape == (0, 80)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("int8_inputs", [False, True])
@pytest.mark.parametrize("rows", [7, 33, 70])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_alone(ops, poison, rows, int8_inputs):
    given, *_ = Case(rows=rows, int8_inputs=int8_inputs).made()
    clean = ops.quantised_linear(*given)
    given[0][rows // 2, 5] = poison
    poisoned = ops.quantised_linear(*given)
    others = torch.arange(rows) != rows // 2
    assert torch.equal(poisoned[others], clean[others])
    assert not poisoned[rows // 2].isfinite().any()


@pytest.mark.parametrize("rows", [5, 20, 60, 100])
def test_neighbours_and_padding_change_no_bit_of_a_row(ops, rows):
    given, *_ = Case("Q4_K", rows, inputs=256).made()
    alone = ops.quantised_linear(*given)[2]
    given[0][:2], given[0][3:] = 3e4, -7
    assert torch.equal(ops.quantised_linear(*given)[2], alone)


def test_rows_of_the_input_may_lie_apart(ops):
    (input, *weight), *_ = Case(rows=9).made()
    apart = torch.randn(18, 300).bfloat16()
    apart[::2, 40:200] = input
    expected = ops.quantised_linear(input, *weight)
    assert torch.equal(ops.quantised_linear(apart[::2, 40:200], *weight), expected)
    columns = input.t().contiguous().t()
    assert torch.equal(ops.quantised_linear(columns, *weight), expected)


@pytest.mark.parametrize("rows", [3, 50])
def test_sums_beyond_float16_do_not_overflow_on_the_way(ops, rows):
    """Each half of the sum is 8e6, where float16 ends at 65504."""
    codes = torch.full((16, 512), 15)
    weight = QuantisedWeight.pack(codes, 4, torch.full((16, 16), 1.0).half())
    input = torch.cat((torch.full((rows, 256), 6e4), torch.full((rows, 256), -6e4)), 1)
    input[:, 0] = 59968
    out = ops.quantised_linear(input.half(), *arguments(weight))
    assert torch.equal(out, torch.full((rows, 16), 7 * (59968 - 6e4)).half())


def test_small_and_large_inputs_are_rounded_to_int8_without_overflow(ops):
    given, exact, _ = Case(rows=4, dtype=torch.float32, int8_inputs=True).made()
    given[0][0], given[0][1], given[0][2] = 0.0, 1e-42, 1e37
    given[0][2, 1:] = 0
    out = ops.quantised_linear(*given).double()
    assert not out[0].any() and (out[1].abs() <= 1e-38).all()
    torch.testing.assert_close(out[2], 1e37 * exact[:, 0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("biased", [False, True])
def test_layers_at_once_give_the_bits_that_each_gives_alone(ops, biased):
    input = torch.randn(5, 512).bfloat16()
    layers = [arguments(quantised_layer(f, n, 512)[0]) for f, n in (("Q4_K", 48), ("Q6_K", 208))]
    biases = [torch.randn(48).bfloat16(), torch.randn(208).bfloat16()] if biased else []
    lists = [*map(list, zip(*layers, strict=True))]
    at_once = ops.quantised_linears(input, *lists, biases, False)
    for index, (layer, out) in enumerate(zip(layers, at_once, strict=True)):
        bias = biases[index] if biased else None
        assert torch.equal(ops.quantised_linear(input, *layer, bias), out)


def test_a_gate_is_silu_of_one_layer_times_the_other(ops):
    input = torch.randn(5, 96).bfloat16()
    layers = [arguments(quantised_layer("Q4_1", 208, 96, seed)[0]) for seed in (3, 4)]
    lists = [*map(list, zip(*layers, strict=True))]
    gate, up = (each.double() for each in ops.quantised_linears(input, *lists, [], True))
    out = ops.quantised_swiglu(input, *lists, [], True)
    torch.testing.assert_close(out.double(), gate * torch.sigmoid(gate) * up, rtol=2**-8, atol=1e-6)
    with pytest.raises(ValueError, match="expected the weights of gate and up"):
        ops.quantised_swiglu(input, *([each[0]] for each in lists), [], True)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_a_weight_are_its_numbers(ops, form):
    weight, exact = quantised_layer(form, 48, 768)
    ids = torch.tensor([0, 17, 47, 5, 5])
    rows = ops.quantised_rows(*arguments(weight), ids, False)
    size = exact.abs().amax(1)[ids, None]
    assert ((rows.double() - exact[ids]).abs() <= size * 2e-6).all()
    rounded = ops.quantised_rows(*arguments(weight), ids, True)  # the interpreter rounds to 0
    torch.testing.assert_close(rounded.float(), rows, rtol=2**-7, atol=0)
    assert rounded.dtype is torch.bfloat16


def test_rows_that_a_weight_does_not_have_are_nan(ops):
    weight, _ = quantised_layer("Q5_K", 48, 256)
    rows = ops.quantised_rows(*arguments(weight), torch.tensor([48, 3, -1, 2**40]), False)
    assert rows[[0, 2, 3]].isnan().all() and rows[1].isfinite().all()
    assert ops.quantised_rows(*arguments(weight), torch.tensor([]).long(), True).shape == (0, 256)


def test_no_number_is_brought_to_the_host(ops):
    case = Case("Q6_K", 20, inputs=256, biased=True, int8_inputs=True)
    weight = arguments(case.made()[2])
    with NoNumbers():
        out = computed(ops, case)
        ops.quantised_rows(*weight, torch.tensor([1, 2]), True)
    assert_right(out, case)


def test_a_launch_is_that_of_the_sizes_alone(ops):
    """Tensors without memory have all that it needs, so a captured graph serves any numbers."""
    from compiled_attn.ops.triton.linear_launch import linear_launch, rows_launch, tile_of

    (input, *weight, bias, int8), *_ = Case(rows=40, biased=True).made()
    given = [each.to("meta") for each in (input, *weight, bias)]
    out = given[0].new_empty(40, 80)
    launch = linear_launch(tuple(given), out, tile_of(40, 160, input.dtype), int8)
    assert launch.grid == (2, 1)
    rows = rows_launch(*given[1:4], torch.empty(7, dtype=torch.int64, device="meta"), out)
    assert rows.grid == (7, 1)


@pytest.mark.parametrize("rows", [5, 20, 70])
@pytest.mark.parametrize("form", ["Q8_0", "Q6_K", "AWQ"])
def test_each_byte_of_a_weight_is_read_once_and_no_other_memory(ops, form, rows):
    from compiled_attn.ops.triton.linear import linear_kernel
    from compiled_attn.ops.triton.linear_launch import linear_launch, tile_of

    (*given, int8), *_ = Case(form, rows, 80, 768, biased=True).made()
    names, out = ("input", "codes", "scales", "steps", "bias"), torch.empty(rows, 80).bfloat16()
    launch = linear_launch(tuple(given), out, tile_of(rows, 768, out.dtype), int8, widen=True)
    with counted() as found:
        linear_kernel[launch.grid](**launch.arguments, **launch.options)
    read = found.read(dict(zip(names, given, strict=True)))
    assert found.written({"out": out}) == {"out": out.nbytes}
    # Compilers merge the loads of a block's halves, which are the same words.
    low = given[1].nbytes if form == "AWQ" else given[1].nbytes * 2 // 3
    assert read["codes"] == given[1].nbytes + (0 if form == "Q8_0" else low)
    assert OTHERS not in read and read["bias"] == given[-1].nbytes


INPUT = torch.zeros(3, 64)
WEIGHT = QuantisedWeight.pack(torch.zeros(32, 64).byte(), 4, torch.ones(32, 2).half())
BAD = [
    ({"input": INPUT.double()}, r"input \[any, 64\] of float32"),
    ({"input": INPUT[:, :32]}, r"input \[any, 64\]"),
    ({"codes": WEIGHT.codes.char()}, "codes .*int8"),
    ({"codes": WEIGHT.codes[:, :, :192].contiguous()}, "codes .*192"),
    ({"codes": WEIGHT.codes[:, ::2]}, "codes"),
    ({"scales": WEIGHT.scales.bfloat16()}, "scales .*bfloat16"),
    ({"scales": WEIGHT.scales[:1]}, r"scales .*\[1, 2, 16\]"),
    ({"scales": torch.ones(2, 3, 16)}, r"scales .*\[2, 3, 16\]"),
    ({"steps": torch.ones(2, 3, 16).byte()}, r"steps .*\[2, 3, 16\]"),
    ({"steps": torch.ones(2, 2, 2, 16).byte()}, "steps"),
    ({"steps": torch.ones(2, 2, 16)}, "steps .*float32"),
    ({"bias": torch.zeros(16)}, r"bias \[32\]"),
    ({"bias": torch.zeros(32).half()}, "bias .*float16"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_wrong_tensors_are_refused(ops, change, message):
    names = ("codes", "scales", "steps")
    good = {"input": INPUT, **dict(zip(names, arguments(WEIGHT), strict=True))}
    with pytest.raises(KernelArgumentError, match=f"quantised_linear: expected .*{message}"):
        ops.quantised_linear(**{**good, **change})
