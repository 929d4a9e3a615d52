"""Packed linear layers compute what plain ones do, and take no more memory."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from compiled_attn.models.packed import (
    PackedEmbedding,
    PackedLinear,
    pack_linears,
    packed_weights,
    quantised_weights,
    widened_weights,
)
from compiled_attn.ops import load, packed_linear
from compiled_attn.ops.packed_linear import BITS_OF, EXACT_INPUTS
from compiled_attn.ops.quantised_linear import round_inputs
from tests.compiled_attn.models.packing import (
    IDS,
    KINDS,
    Kind,
    Small,
    as_bf16_widen,
    of_any_kind,
)
from tests.compiled_attn.ops.packed_layers import bf16_weights_by


@pytest.fixture
def model() -> Small:
    return KINDS["packed"].model()


@of_any_kind
def test_layers_and_what_they_share_are_packed_and_give_the_same(kind):
    model, plain = kind.model(), kind.model()
    parameters = [*model.parameters()]
    for module in (plain.head, *plain.inner.values()):
        module.weight.data = kind.rounded(module.weight.detach())
    pack_linears(model, contextlib.ExitStack(), kind.packing)
    assert packed_weights(model) == 3
    assert quantised_weights(model) == 3 * bool(kind.bits)
    assert widened_weights(model) == 3 * (kind is KINDS["bf16-widen"])
    assert isinstance(model.head, PackedLinear) and isinstance(model.embedding, PackedEmbedding)
    assert model.head.weight is model.embedding.weight
    assert all(isinstance(each, PackedLinear) for each in model.inner.values())
    assert all(type(each) is nn.Linear for each in (model.odd, model.watched, model.of_scaled))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(model.embedding(IDS), plain.embedding(IDS), rtol=0, atol=0)
        if not kind.bits:  # see below
            for one, other in zip(model(IDS), plain(IDS), strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", BITS_OF)
@pytest.mark.parametrize(
    "layer", [lambda m: m.head, lambda m: m.inner["a"], lambda m: m.inner["b"]]
)
def test_layers_of_few_bits_compute_with_rounded_weights(layer, kind):
    model = KINDS[kind].model()
    input = torch.randn(5, 64).to(KINDS[kind].dtype)
    weight, bias = layer(model).weight.detach().float(), layer(model).bias
    rounded = Kind(torch.float32, KINDS[kind].packing).rounded(weight).double()
    exact = input if kind in EXACT_INPUTS else round_inputs(input)
    expected = exact.double() @ rounded.T + (0 if bias is None else bias.detach().double())
    pack_linears(model, contextlib.ExitStack(), KINDS[kind].packing)
    with torch.no_grad():
        out, plain = layer(model)(input), layer(model).plain(input)
    is_float32 = KINDS[kind].dtype is torch.float32
    rounding = {"rtol": 1e-5, "atol": 1e-4} if is_float32 else {"rtol": 2**-8, "atol": 1e-3}
    torch.testing.assert_close(out.double(), expected, **rounding)
    torch.testing.assert_close(plain.double(), expected, **rounding)


def test_weights_in_16_bits_give_the_very_bits_of_whole_weights():
    whole, packed = KINDS["bf16-widen"].model(), KINDS["bf16-widen"].model()
    pack_linears(whole, contextlib.ExitStack())
    pack_linears(packed, contextlib.ExitStack(), as_bf16_widen)
    with torch.no_grad(), bf16_weights_by("float32", load(strict=True)):
        for one, other in zip(packed(IDS), whole(IDS), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("kind", "share"), [("bf16-widen", 2), ("int8", 2), ("int4", 8)])
def test_integers_take_a_share_of_the_memory_and_their_parameters_none(kind, share):
    model = KINDS[kind].model()

    def layers() -> tuple[nn.Module, ...]:
        return model.head, *model.inner.values()

    before = sum(layer.weight.nbytes for layer in layers())
    pack_linears(model, contextlib.ExitStack(), KINDS[kind].packing)
    assert sum(layer.packed.nbytes for layer in layers()) * share == before
    for layer in layers():
        assert layer.weight.untyped_storage().nbytes() == layer.weight.itemsize


@pytest.mark.parametrize("kind", ["packed", "float32"])
def test_packed_floats_take_no_more_memory(kind):
    model = KINDS[kind].model()

    def size() -> int:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        return sum(storage.nbytes() for storage in storages.values())

    before = size()
    pack_linears(model, contextlib.ExitStack(), KINDS[kind].packing)
    assert size() == before


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_cast_changes_no_scale(kind):
    model = KINDS[kind].model()
    pack_linears(model, contextlib.ExitStack(), KINDS[kind].packing)
    before = {name: layer.quantised for name, layer in model.inner.items()}
    model.to(torch.float64).to(torch.bfloat16)
    for name, layer in model.inner.items():
        assert torch.equal(layer.quantised.dequantise(), before[name].dequantise())
    with torch.no_grad():
        assert all(out.isfinite().all() for out in model(IDS))


def test_a_weight_with_more_bits_stays_whole():
    model = KINDS["bf16-widen"].model()
    with torch.no_grad():
        model.inner["a"].weight[3, 5] = 1 / 3
    pack_linears(model, contextlib.ExitStack(), as_bf16_widen)
    assert packed_weights(model) == 3 and widened_weights(model) == 2


def test_gradients_are_those_of_plain_layers(model):
    plain, input = copy.deepcopy(model), torch.randn(3, 64).bfloat16()
    pack_linears(model, contextlib.ExitStack())
    with torch.no_grad():
        model.inner["a"](input)  # by the op
    for each in (plain, model):
        each.inner["a"](input).square().sum().backward()
        each.head(each.embedding(IDS)).square().sum().backward()
    for layer in (lambda m: m.inner["a"], lambda m: m.head):
        expected, packed = layer(plain), layer(model)
        assert torch.equal(packed_linear.unpack(packed.weight.grad), expected.weight.grad)
    assert torch.equal(model.inner["a"].bias.grad, plain.inner["a"].bias.grad)


def test_memory_that_two_parameters_share_stays(model):
    model.inner["b"].weight = nn.Parameter(model.inner["a"].weight.detach()[:32])
    pack_linears(model, contextlib.ExitStack())
    assert packed_weights(model) == 1
    assert type(model.inner["a"]) is nn.Linear and type(model.inner["b"]) is nn.Linear


def test_only_chosen_weights_are_packed(model):
    pack_linears(model, contextlib.ExitStack(), lambda w: "packed" if w.shape[0] == 32 else None)
    assert packed_weights(model) == 1
    assert type(model.head) is nn.Linear and isinstance(model.inner["b"], PackedLinear)


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64)])
def test_a_layer_takes_inputs_of_any_rank(model, shape):
    input = torch.randn(shape).bfloat16()
    with torch.no_grad():
        plain = model.inner["b"](input)
        pack_linears(model, contextlib.ExitStack())
        torch.testing.assert_close(model.inner["b"](input), plain, rtol=2e-2, atol=2e-2)
