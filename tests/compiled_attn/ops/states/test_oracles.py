"""The state ops against transformers' own functions and against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from compiled_attn.ops import NativeOps
from tests.compiled_attn.ops.kernels import BEST, SLOW, loaded
from tests.compiled_attn.ops.states.state_cases import (
    DTYPES,
    LAYERS,
    Draw,
    Layer,
    alone,
    delta,
    run,
    scan,
    ssd,
    tables,
)

pytestmark = pytest.mark.usefixtures("without_gradients")
LENGTHS = (1, 2, 3, 63, 64, 65, 130)


@pytest.fixture(params=["reference", BEST, *SLOW], scope="module")
def ops(request) -> NativeOps:
    return loaded(request.param)


def of_conv(layer: Layer) -> tuple[Tensor, Tensor]:
    from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn

    x, weight = layer.rows["x"].T[None], layer.weights["weight"]
    activation = "silu" if layer.options[0] else None
    out = causal_conv1d_fn(x, weight, layer.weights["bias"], activation)[0].T
    padded = functional.pad(x[0], (weight.shape[1] - 1, 0))
    return out, padded[:, padded.shape[1] - weight.shape[1] + 1 :]


def of_delta(layer: Layer) -> tuple[Tensor, Tensor]:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    by_channel = layer.rows["g"].dim() == 3
    function = chunk_kimi_delta_attention if by_channel else torch_chunk_gated_delta_rule
    inputs = (layer.rows[name][None] for name in layer.order)
    out, state = function(
        *inputs, output_final_state=True, use_qk_l2norm_in_kernel=layer.options[0]
    )
    return out[0], state[0]


def of_ssd(layer: Layer) -> tuple[Tensor, Tensor]:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    inputs = {name: each[None] for name, each in layer.rows.items()} | layer.weights
    x, *rest = (inputs[name] for name in layer.order[:-1])
    out, state = mamba2_chunk_scan(x, *rest, chunk_size=32, D=inputs["D"], return_final_states=True)
    return out[0], state[0]


def of_scan(layer: Layer) -> tuple[Tensor, Tensor]:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    x, dt, b, c = (layer.rows[name].T[None] for name in ("x", "dt", "B", "C"))
    d = layer.weights["D"]
    out, state = mamba_selective_scan(
        x, dt, layer.weights["A"], b, c, D=d if d is None else d.float(), return_last_state=True
    )
    return out[0].T, state[0]


TRANSFORMERS: dict[str, Callable[[Layer], tuple[Tensor, Tensor]]] = {
    "state_conv_": of_conv, "state_delta_": of_delta, "state_ssd_": of_ssd, "state_scan_": of_scan
}  # fmt: skip


def off(got: Tensor, exact: Tensor) -> float:
    """The greatest error, of the spread of exact values."""
    return float((got.double() - exact).abs().max() / (exact.std(correction=0) + 1e-3))


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", LAYERS)
def test_float64_is_what_transformers_computes_but_for_its_rounding(name, tokens):
    pytest.importorskip("transformers")
    layer = LAYERS[name](Draw(torch.float32), tokens)
    results = TRANSFORMERS[layer.op](layer), alone(None, layer.to_double())
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        if got.numel():  # its chunks sum logarithms of up to 64 decays in float32
            assert off(got, expected) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_the_result_is_that_of_float64(ops, name, dtype):
    """Inputs are exact in float64; results are rounded to their dtype."""
    for tokens in LENGTHS:
        layer = LAYERS[name](Draw(dtype, tokens), tokens)
        (out, state), (exact, exact_state) = alone(ops, layer), alone(None, layer.to_double())
        assert out.dtype is (
            dtype if layer.op in ("state_conv_", "state_delta_") else torch.float32
        )
        assert state.dtype is layer.state_dtype
        rounding = torch.finfo(out.dtype).eps * exact.abs()
        if layer.op == "state_conv_":  # rounded before the activation too
            rounding = 2 * rounding + torch.finfo(dtype).eps * exact.std(correction=0)
        excess = ((out.double() - exact).abs() - rounding).clamp_min(0)
        assert off(exact + excess, exact) < 1e-5
        if state.numel():
            assert off(state, exact_state) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_not_farther_from_float64_than_transformers(ops, name, dtype):
    pytest.importorskip("transformers")
    layer = LAYERS[name](Draw(dtype), 130)
    results = alone(ops, layer), TRANSFORMERS[layer.op](layer), alone(None, layer.to_double())
    for got, theirs, exact in zip(*results, strict=True):
        if got.numel():
            assert off(got, exact) <= 2 * off(theirs, exact) + 2e-6


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_continues_as_in_transformers_single_steps(ops, name):
    """Decodes: transformers' forms for one token, from the same state."""
    pytest.importorskip("transformers")
    layer = LAYERS[name](Draw(torch.float32), 40)
    if name.startswith("conv"):
        whole, _ = of_conv(layer)
        for t, out in _decodes(ops, layer):
            torch.testing.assert_close(out, whole[t], atol=1e-5, rtol=1e-5)
        return
    update = {"delta": _recurrent_delta, "ssd": _ssd_update, "scan": _scan_update}
    theirs = layer.state(0.0)[3]
    for t, out in _decodes(ops, layer):
        expected, theirs = update[layer.op.split("_")[1]](layer.tokens(t, t + 1), theirs)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def _decodes(ops, layer):
    state = layer.state()
    for t in range(len(next(iter(layer.rows.values())))):
        yield t, run(ops, layer.tokens(t, t + 1), state, tables([(1, t + 1, 3)]))[0]


def _recurrent_delta(layer, state):
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    by_channel = layer.rows["g"].dim() == 3
    function = recurrent_kimi_delta_attention if by_channel else torch_recurrent_gated_delta_rule
    inputs = (layer.rows[name][None] for name in layer.order)
    out, new = function(
        *inputs, initial_state=state[None], output_final_state=True,
        use_qk_l2norm_in_kernel=layer.options[0],
    )  # fmt: skip
    return out[0, 0], new[0]


def _ssd_update(layer, state):
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    x, dt, b, c = (layer.rows[name] for name in ("x", "dt", "B", "C"))
    size, dim = state.shape[-1], state.shape[1]
    a, d = (None if each is None else each.view(-1, 1).expand(-1, dim)
            for each in (layer.weights["A"], layer.weights["D"]))  # fmt: skip
    new = state[None].clone()
    wide_a = a.unsqueeze(2).expand(-1, -1, size)
    out = mamba2_selective_state_update(
        new, x, dt.unsqueeze(2).expand(-1, -1, dim), wide_a, b, c, D=d
    )
    return out[0], new[0]


def _scan_update(layer, state):
    from transformers.models.mamba.modeling_mamba import mamba_selective_state_update

    new = state[None].clone()
    inputs = layer.rows | layer.weights
    out = mamba_selective_state_update(new, *(inputs[name] for name in layer.order))
    return out[0], new[0]


def test_the_scale_of_queries_can_be_given(ops):
    layer = delta(Draw(torch.float32), 5, 1, 2, 16, 8)
    scaled = layer.to_double()
    exact = alone(None, scaled)[0] * 16**0.5 * 3
    given = Layer(**{**vars(layer), "options": (True, 3.0)})
    torch.testing.assert_close(alone(ops, given)[0].double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ssd", "scan", "delta"])
def test_strong_decays_forget_everything(ops, kind):
    """Decays that underflow leave what the last token wrote, and no NaN."""
    draw = Draw(torch.float32)
    layer = {"ssd": lambda: ssd(draw, 9, 2, 8, 1, 16), "scan": lambda: scan(draw, 9, 20, 16),
             "delta": lambda: delta(draw, 9, 2, 2, 16, 16)}[kind]()  # fmt: skip
    name = "g" if kind == "delta" else "A"
    inputs = layer.rows if kind == "delta" else layer.weights
    inputs[name] = inputs[name] - 1e6
    out, state = alone(ops, layer)
    last, last_state = alone(ops, layer.tokens(8))
    assert torch.equal(out[8], last[0]) and torch.equal(state, last_state)
