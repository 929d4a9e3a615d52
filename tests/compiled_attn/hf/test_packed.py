"""Packed linear layers of a model: the same logits, the same state, and a way back."""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
import torch
from torch import nn

from compiled_attn.errors import ModelRefused
from compiled_attn.hf import PagedCausalLM, cache_for
from compiled_attn.hf.packed import (
    PackedEmbedding,
    PackedLinear,
    pack_linears,
    packed_weights,
    quantised_weights,
)
from compiled_attn.hf.proof import check
from compiled_attn.hf.rounding import last_logits, rounding_of
from compiled_attn.ops import load, packed_linear
from tests.compiled_attn.hf.families import small_model
from tests.compiled_attn.hf.test_proof import Result
from tests.compiled_attn.tiny import plain_generate


class Small(nn.Module):
    """Layers that are packed, and one of each kind that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 64)
        self.head = nn.Linear(64, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.inner = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 32, bias=False)})
        self.odd = nn.Linear(64, 24)
        self.watched = nn.Linear(64, 32)
        self.watched.register_forward_hook(lambda *_: None)
        self.scaled = Scaled(48, 64)
        self.of_scaled = nn.Linear(64, 48, bias=False)
        self.of_scaled.weight = self.scaled.weight

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        x = self.inner["a"](self.embedding(ids)) + self.scaled(ids)
        return [self.head(x), self.inner["b"](x), self.odd(x), self.watched(x), self.of_scaled(x)]


class Scaled(nn.Embedding):
    """An embedding that does more than torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


@pytest.fixture
def model() -> Small:
    load()
    torch.manual_seed(0)
    return Small().bfloat16().eval()


IDS = torch.tensor([[3, 17, 47], [0, 16, 31]])


def test_layers_and_what_they_share_are_packed_and_give_the_same(model):
    with torch.no_grad():
        before = model(IDS)
        pack_linears(model, contextlib.ExitStack())
        assert packed_weights(model) == 3
        after = model(IDS)
    assert isinstance(model.head, PackedLinear) and isinstance(model.embedding, PackedEmbedding)
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.inner["a"], PackedLinear) and isinstance(model.inner["b"], PackedLinear)
    for kept in (model.odd, model.watched, model.of_scaled):
        assert type(kept) is nn.Linear
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_the_weights_take_no_more_memory(model):
    def size() -> int:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
        return sum(storage.nbytes() for storage in storages.values())

    before, parameters = size(), [*model.parameters()]
    pack_linears(model, contextlib.ExitStack())
    assert size() == before
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))


def test_undoing_gives_the_layers_and_the_weights_back(model):
    modules = dict(model.named_modules())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with contextlib.ExitStack() as undo:
        pack_linears(model, undo)
    assert all(module is modules[name] for name, module in model.named_modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_the_state_that_goes_in_and_out_is_that_of_plain_weights(model):
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    pack_linears(model, contextlib.ExitStack())
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in plain.items()
    }
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    other = {name: torch.randn_like(value) for name, value in plain.items()}
    other["head.weight"] = other["embedding.weight"]
    other["of_scaled.weight"] = other["scaled.weight"]
    model.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def test_a_packed_model_that_is_cast_takes_plain_weights_of_its_dtype(model):
    pack_linears(model, contextlib.ExitStack())
    model.float()
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    other["head.weight"] = other["embedding.weight"]
    other["of_scaled.weight"] = other["scaled.weight"]
    model.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
    wrong = {**other, "inner.a.weight": torch.zeros(32, 32)}
    with pytest.raises(RuntimeError, match=r"size mismatch for inner\.a\.weight"):
        model.load_state_dict(wrong)


def test_weights_of_float32_are_packed_and_computed_with_as_what_they_are_cast_to():
    model = Small().eval()
    plain = copy.deepcopy(model)
    with torch.no_grad():
        before = model(IDS)
        pack_linears(model, contextlib.ExitStack(), packed_linear.as_int8)
        assert packed_weights(model) == 0  # int8 is for bfloat16
        pack_linears(model, contextlib.ExitStack())
        assert packed_weights(model) == 3
        torch.testing.assert_close(model(IDS), before)
        assert all(
            torch.equal(w, plain.state_dict()[name]) for name, w in model.state_dict().items()
        )
        for dtype in (torch.float64, torch.bfloat16):
            torch.testing.assert_close(model.to(dtype)(IDS), plain.to(dtype)(IDS))


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


def test_an_interrupt_while_packing_leaves_the_model_as_it_was(model, monkeypatch):
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    pack, calls = packed_linear.pack, []

    def interrupted(weight):
        calls.append(weight)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return pack(weight)

    monkeypatch.setattr(packed_linear, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as undo:
        pack_linears(model, undo)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_wider_numbers_compute_with_the_same_weights(model):
    with torch.no_grad():
        wider = copy.deepcopy(model).float()(IDS)
        pack_linears(model, contextlib.ExitStack())
        for computed in (model.float()(IDS), wider):
            for one, other in zip(computed, wider, strict=True):
                torch.testing.assert_close(one, other)


def test_the_rounding_of_a_packed_model_can_be_measured():
    model = small_model("llama").to(torch.bfloat16)
    pack_linears(model, contextlib.ExitStack())
    with torch.no_grad():
        assert rounding_of(model, [3, 5, 7], last_logits(model, [3, 5, 7])) is not None


def test_a_check_compares_packed_layers_with_plain_ones(monkeypatch):
    model = small_model("llama").to(torch.bfloat16)
    prompt = [3, 5, 7, 11]
    plain = plain_generate(model, prompt, 8)
    pack_linears(model, contextlib.ExitStack())
    kernel = torch.ops.compiled_attn.packed_linear
    monkeypatch.setattr(torch.ops.compiled_attn, "packed_linear", lambda *args: -kernel(*args))
    wrong = plain_generate(model, prompt, 8)
    assert wrong != plain
    results = [Result(0, prompt, plain), Result(1, prompt, wrong)]
    (mismatch,) = check(model, results, 2).mismatches
    assert mismatch.request == 1
    assert plain_generate(model, prompt, 8) == wrong


def test_only_wanted_weights_are_packed(model):
    pack_linears(model, contextlib.ExitStack(), lambda w: "packed" if w.shape[0] == 32 else None)
    assert packed_weights(model) == 1
    assert type(model.head) is nn.Linear and isinstance(model.inner["b"], PackedLinear)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_served_model_is_packed_and_right(family):
    model = small_model(family).to(torch.bfloat16)
    paged = PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_packed)
    kinds = {type(module) for module in model.modules()}
    assert (paged.packed > 0) == (PackedLinear in kinds)
    again = PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_packed)
    assert again.packed == paged.packed


def test_an_interrupt_while_a_size_is_measured_leaves_the_model_as_it_was():
    def interrupted(weight):
        raise KeyboardInterrupt

    model = small_model("llama").to(torch.bfloat16)
    attention = model.config._attn_implementation
    with pytest.raises(KeyboardInterrupt):
        PagedCausalLM(model, cache_for(model, 5, 4), packs=interrupted)
    assert model.config._attn_implementation == attention
    assert model(input_ids=torch.tensor([[3, 5]])).logits.isfinite().all()


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64)])
def test_a_layer_takes_inputs_of_any_rank(model, shape):
    input = torch.randn(shape).bfloat16()
    with torch.no_grad():
        plain = model.inner["b"](input)
        pack_linears(model, contextlib.ExitStack())
        torch.testing.assert_close(model.inner["b"](input), plain, rtol=2e-2, atol=2e-2)


def test_a_model_that_packing_would_change_keeps_its_layers(monkeypatch, caplog):
    model = small_model("llama").to(torch.bfloat16)
    modules = dict(model.named_modules())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    pack = packed_linear.pack
    monkeypatch.setattr(packed_linear, "pack", lambda weight: pack(-weight))
    monkeypatch.setattr(packed_linear, "unpack", lambda weight: -_UNPACK(weight))
    with caplog.at_level(logging.WARNING):
        paged = PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_packed)
    assert paged.packed == 0 and "weights are not packed" in caplog.text
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight in int8 and back, in float32: a scale for each output."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round() * scale


def test_layers_of_int8_compute_with_rounded_weights_of_half_the_memory(model):
    plain = copy.deepcopy(model)
    packed = [model.head.weight, model.inner["a"].weight, model.inner["b"].weight]
    before, input = sum(w.nbytes for w in packed), torch.randn(5, 64).bfloat16()
    pack_linears(model, contextlib.ExitStack(), packed_linear.as_int8)
    assert packed_weights(model) == quantised_weights(model) == 3
    layers = model.head, model.inner["a"], model.inner["b"]
    assert sum(each.packed.nbytes for each in layers) * 2 == before
    assert all(w.untyped_storage().nbytes() == 2 for w in packed)
    for layer in (lambda m: m.head, lambda m: m.inner["a"], lambda m: m.inner["b"]):
        weight, bias = _rounded(layer(plain).weight), layer(plain).bias
        expected = input.double() @ weight.double().T + (0 if bias is None else bias.double())
        with torch.no_grad():
            for out in (layer(model)(input), layer(model).plain(input)):
                torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2e-2)
    assert model.head.weight is model.embedding.weight is packed[0]
    assert torch.equal(model.embedding(IDS), _rounded(plain.embedding.weight).bfloat16()[IDS])


def test_undoing_int8_gives_the_very_weights_back(model):
    modules, parameters = dict(model.named_modules()), [*model.parameters()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    places = [parameter.data_ptr() for parameter in parameters]
    with contextlib.ExitStack() as undo:
        pack_linears(model, undo, packed_linear.as_int8)
    assert all(module is modules[name] for name, module in model.named_modules())
    assert [*map(id, parameters)] == [*map(id, model.parameters())]
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_the_state_of_int8_layers_is_their_rounded_weights_and_takes_others(model):
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    pack_linears(model, contextlib.ExitStack(), packed_linear.as_int8)
    rounded = model.state_dict()
    assert {name: value.dtype for name, value in rounded.items()} == {
        name: value.dtype for name, value in plain.items()
    }
    for name in ("inner.a.weight", "head.weight", "embedding.weight"):
        assert torch.equal(rounded[name], _rounded(plain[name]).bfloat16()), name
    other = {name: torch.randn_like(value) for name, value in plain.items()}
    other["head.weight"] = other["embedding.weight"]
    other["of_scaled.weight"] = other["scaled.weight"]
    model.load_state_dict(other)
    for name in ("inner.b.weight", "head.weight"):
        assert torch.equal(model.state_dict()[name], _rounded(other[name]).bfloat16()), name


def test_a_check_of_int8_layers_compares_with_plain_ones_of_rounded_weights():
    model = small_model("llama").to(torch.bfloat16)
    prompt = [3, 5, 7, 11]
    rounded = copy.deepcopy(model)
    pack_linears(rounded, contextlib.ExitStack(), packed_linear.as_int8)
    results = [Result(0, prompt, plain_generate(rounded, prompt, 8))]
    assert not check(rounded, results, 1).mismatches


def test_a_model_that_does_not_tolerate_int8_is_refused_and_left_as_it_was(monkeypatch):
    model = small_model("llama").to(torch.bfloat16)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    quantise = packed_linear.quantise
    monkeypatch.setattr(packed_linear, "quantise", lambda weight: quantise(-weight))
    with pytest.raises(ModelRefused, match="tolerates weights of int8"):
        PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_int8)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not packed_weights(model)


_UNPACK = packed_linear.unpack
