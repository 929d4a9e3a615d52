"""Packed linear layers of a model: the same logits, the same state, and a way back."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from compiled_attn.errors import ModelRefused
from compiled_attn.models.hf import PagedCausalLM, cache_for
from compiled_attn.models.hf.proof import check
from compiled_attn.models.hf.rounding import last_logits, rounding_of
from compiled_attn.models.packed import (
    PackedEmbedding,
    PackedLinear,
    halved_weights,
    pack_linears,
    packed_weights,
    quantised_weights,
)
from compiled_attn.ops import load, packed_linear
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.models.hf.test_proof import Result
from tests.compiled_attn.ops.packed_layers import halves_by
from tests.compiled_attn.tiny import plain_generate

IDS = torch.tensor([[3, 17, 47], [0, 16, 31]])


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


def in_halves(weight: torch.Tensor) -> packed_linear.Packing | None:
    return "halves" if packed_linear.has_halves(weight) else "packed"


@dataclass
class Kind:
    """A packing, and the dtype of the models that it is for."""

    dtype: torch.dtype
    packing: Callable[[torch.Tensor], packed_linear.Packing | None]

    def model(self) -> Small:
        load()
        torch.manual_seed(0)
        return Small().bfloat16().to(self.dtype).eval()

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as it comes back, in its dtype."""
        if self.packing is not packed_linear.as_int8:
            return weight
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        return ((weight.float() / scale).round() * scale).to(self.dtype)


KINDS = {
    "packed": Kind(torch.bfloat16, packed_linear.as_packed),
    "float32": Kind(torch.float32, packed_linear.as_packed),
    "halves": Kind(torch.float32, in_halves),
    "int8": Kind(torch.bfloat16, packed_linear.as_int8),
}
of_any_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture
def model() -> Small:
    return KINDS["packed"].model()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert value.dtype is expected[name].dtype and torch.equal(value, expected[name]), name


def with_shared(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with the weights that two layers share."""
    shared = {"head.weight": "embedding.weight", "of_scaled.weight": "scaled.weight"}
    return {name: state[shared.get(name, name)] for name in state}


def of_packed(kind: Kind, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state as a packed model returns it."""
    packed = "head.weight", "embedding.weight", "inner.a.weight", "inner.b.weight"
    return {name: kind.rounded(w) if name in packed else w for name, w in state.items()}


@of_any_kind
def test_layers_and_what_they_share_are_packed_and_give_the_same(kind):
    model, plain = kind.model(), kind.model()
    parameters = [*model.parameters()]
    for module in (plain.head, *plain.inner.values()):
        module.weight.data = kind.rounded(module.weight.detach())
    pack_linears(model, contextlib.ExitStack(), kind.packing)
    assert packed_weights(model) == 3
    assert quantised_weights(model) == 3 * (kind is KINDS["int8"])
    assert halved_weights(model) == 3 * (kind is KINDS["halves"])
    assert isinstance(model.head, PackedLinear) and isinstance(model.embedding, PackedEmbedding)
    assert model.head.weight is model.embedding.weight
    assert all(isinstance(each, PackedLinear) for each in model.inner.values())
    assert all(type(each) is nn.Linear for each in (model.odd, model.watched, model.of_scaled))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(model.embedding(IDS), plain.embedding(IDS), rtol=0, atol=0)
        if kind is not KINDS["int8"]:  # whose product is not rounded to bfloat16, see below
            for one, other in zip(model(IDS), plain(IDS), strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "layer", [lambda m: m.head, lambda m: m.inner["a"], lambda m: m.inner["b"]]
)
def test_layers_of_int8_compute_with_rounded_weights(layer):
    model, input = KINDS["int8"].model(), torch.randn(5, 64).bfloat16()
    weight, bias = layer(model).weight.detach().float(), layer(model).bias
    scale = weight.abs().amax(1, keepdim=True) / 127
    rounded = ((weight / scale).round() * scale).double()
    expected = input.double() @ rounded.T + (0 if bias is None else bias.detach().double())
    pack_linears(model, contextlib.ExitStack(), packed_linear.as_int8)
    with torch.no_grad():
        out, plain = layer(model)(input), layer(model).plain(input)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-3)  # rounded once
    torch.testing.assert_close(plain.double(), expected, rtol=2**-7, atol=2**-5)  # so are weights


def test_halves_give_the_very_bits_of_whole_weights():
    whole, halves = KINDS["halves"].model(), KINDS["halves"].model()
    pack_linears(whole, contextlib.ExitStack())
    pack_linears(halves, contextlib.ExitStack(), in_halves)
    with torch.no_grad(), halves_by("float32", load(strict=True)):
        for one, other in zip(halves(IDS), whole(IDS), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["halves", "int8"])
def test_integers_take_half_of_the_memory_and_their_parameters_none(kind):
    model = KINDS[kind].model()

    def layers() -> tuple[nn.Module, ...]:
        return model.head, *model.inner.values()

    before = sum(layer.weight.nbytes for layer in layers())
    pack_linears(model, contextlib.ExitStack(), KINDS[kind].packing)
    assert sum(layer.packed.nbytes for layer in layers()) * 2 == before
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


@of_any_kind
def test_undoing_restores_layers_and_weights(kind):
    model = kind.model()
    modules, parameters, state = dict(model.named_modules()), [*model.parameters()], state_of(model)
    addresses = [parameter.data_ptr() for parameter in parameters]
    with contextlib.ExitStack() as undo:
        pack_linears(model, undo, kind.packing)
    assert all(module is modules[name] for name, module in model.named_modules())
    assert [*map(id, parameters)] == [*map(id, model.parameters())]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert_state(model, state)
    if kind is KINDS["int8"]:  # not converted back
        assert [parameter.data_ptr() for parameter in parameters] == addresses


@of_any_kind
def test_the_state_that_goes_in_and_out_is_that_of_plain_weights(kind):
    model = kind.model()
    plain = state_of(model)
    pack_linears(model, contextlib.ExitStack(), kind.packing)
    assert_state(model, of_packed(kind, plain))
    other = {name: torch.randn_like(w).bfloat16().to(w.dtype) for name, w in plain.items()}
    other = with_shared(other)
    model.load_state_dict(other)
    assert_state(model, of_packed(kind, other))
    with pytest.raises(RuntimeError, match=r"size mismatch for inner\.a\.weight"):
        model.load_state_dict({**other, "inner.a.weight": torch.zeros(32, 32)})


def test_halves_refuse_a_state_that_they_cannot_hold():
    model = KINDS["halves"].model()
    pack_linears(model, contextlib.ExitStack(), in_halves)
    state = state_of(model)
    wrong = {**state, "inner.a.weight": state["inner.a.weight"] + 1 / 3}
    with pytest.raises(RuntimeError, match=r"for inner\.a\.weight weights that bfloat16 holds"):
        model.load_state_dict(wrong)
    assert_state(model, state)


@pytest.mark.parametrize("kind", ["packed", "float32", "halves"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_model_that_is_cast_computes_and_loads_like_a_plain_one(kind, dtype):
    model, plain = KINDS[kind].model(), KINDS[kind].model()
    pack_linears(model, contextlib.ExitStack(), KINDS[kind].packing)
    model.to(dtype), plain.to(dtype)
    if dtype is not KINDS[kind].dtype:  # else by the op
        with torch.no_grad():
            for one, other in zip(model(IDS), plain(IDS), strict=True):
                assert one.dtype is dtype
                torch.testing.assert_close(one, other)
    state = state_of(model)
    assert all(value.dtype is dtype for value in state.values())
    model.load_state_dict(state)
    assert_state(model, state)


def test_weights_of_float32_are_not_packed_as_int8():
    model = KINDS["float32"].model()
    pack_linears(model, contextlib.ExitStack(), packed_linear.as_int8)
    assert packed_weights(model) == 0


def test_a_weight_with_more_bits_stays_whole():
    model = KINDS["halves"].model()
    with torch.no_grad():
        model.inner["a"].weight[3, 5] = 1 / 3
    pack_linears(model, contextlib.ExitStack(), in_halves)
    assert packed_weights(model) == 3 and halved_weights(model) == 2


def test_a_model_whose_weights_are_all_in_16_bits_has_its_dtype():
    load()
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))).bfloat16().float()
    pack_linears(model, contextlib.ExitStack(), in_halves)
    assert packed_weights(model) == halved_weights(model) == 3
    assert {p.dtype for p in model.parameters()} == {torch.float32}


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


def test_an_exception_while_packing_leaves_the_model_unchanged(model, monkeypatch):
    state, pack, calls = state_of(model), packed_linear.pack, []

    def interrupted(weight):
        calls.append(weight)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return pack(weight)

    monkeypatch.setattr(packed_linear, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as undo:
        pack_linears(model, undo)
    assert_state(model, state)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


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


# Models of transformers


def llama(kind: str) -> nn.Module:
    load()
    return small_model("llama").to(torch.bfloat16).to(KINDS[kind].dtype)


@pytest.mark.parametrize("kind", ["packed", "halves"])
def test_the_rounding_of_a_packed_model_is_that_of_the_plain_one(kind):
    model, text = llama(kind), [3, 5, 7]
    plain = rounding_of(model, text, last_logits(model, text))
    pack_linears(model, contextlib.ExitStack(), KINDS[kind].packing)
    with torch.no_grad():
        rounding = rounding_of(model, text, last_logits(model, text))
    torch.testing.assert_close(rounding.exact, plain.exact)


def test_a_check_compares_packed_layers_with_plain_ones(monkeypatch):
    model, prompt = llama("packed"), [3, 5, 7, 11]
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


def test_a_check_of_int8_layers_compares_with_plain_ones_of_rounded_weights():
    model, prompt = llama("int8"), [3, 5, 7, 11]
    pack_linears(model, contextlib.ExitStack(), packed_linear.as_int8)
    results = [Result(0, prompt, plain_generate(model, prompt, 8))]
    assert not check(model, results, 1).mismatches


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_served_model_is_packed_and_right(family):
    model = small_model(family).to(torch.bfloat16)
    paged = PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_packed)
    kinds = {type(module) for module in model.modules()}
    assert (paged.packed > 0) == (PackedLinear in kinds)
    again = PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_packed)
    assert again.packed == paged.packed


def test_an_exception_while_a_packing_is_chosen_leaves_the_model_unchanged():
    def interrupted(weight):
        raise KeyboardInterrupt

    model = llama("packed")
    attention = model.config._attn_implementation
    with pytest.raises(KeyboardInterrupt):
        PagedCausalLM(model, cache_for(model, 5, 4), packs=interrupted)
    assert model.config._attn_implementation == attention
    assert model(input_ids=torch.tensor([[3, 5]])).logits.isfinite().all()


def test_a_model_that_packing_would_change_keeps_its_layers(monkeypatch, caplog):
    model = llama("packed")
    modules, state = dict(model.named_modules()), state_of(model)
    pack, unpack = packed_linear.pack, packed_linear.unpack
    monkeypatch.setattr(packed_linear, "pack", lambda weight: pack(-weight))
    monkeypatch.setattr(packed_linear, "unpack", lambda weight: -unpack(weight))
    with caplog.at_level(logging.WARNING):
        paged = PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_packed)
    assert paged.packed == 0 and "weights are not packed" in caplog.text
    assert all(module is modules[name] for name, module in model.named_modules())
    assert_state(model, state)


def test_a_model_that_does_not_tolerate_halves_is_packed_whole(monkeypatch, caplog):
    model, halve, unpack = llama("halves"), packed_linear.halve, packed_linear.unpack
    monkeypatch.setattr(packed_linear, "halve", lambda weight: ~halve(weight))
    monkeypatch.setattr(
        packed_linear, "unpack", lambda w: unpack(~w if w.dtype is torch.int16 else w)
    )
    with caplog.at_level(logging.WARNING):
        paged = PagedCausalLM(model, cache_for(model, 5, 4), packs=in_halves)
    assert paged.packed and not paged.halved
    assert "weights are not packed in 16 bits" in caplog.text


def test_a_model_that_does_not_tolerate_int8_is_refused_and_left_unchanged(monkeypatch):
    model = llama("int8")
    state, quantise = state_of(model), packed_linear.quantise
    monkeypatch.setattr(packed_linear, "quantise", lambda weight: quantise(-weight))
    with pytest.raises(ModelRefused, match="tolerates weights of int8"):
        PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_int8)
    assert_state(model, state)
    assert not packed_weights(model)
