"""Weights of float32 in 16 bits, where bfloat16 holds them: the same in half of the memory."""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
import torch

from compiled_attn.hf import PagedCausalLM, cache_for
from compiled_attn.hf.packed import halved_weights, pack_linears, packed_weights
from compiled_attn.hf.rounding import last_logits, rounding_of
from compiled_attn.ops import load, packed_linear
from tests.compiled_attn.hf.families import small_model
from tests.compiled_attn.hf.test_packed import IDS, Small
from tests.compiled_attn.ops.packed_layers import halves_by


@pytest.fixture
def single() -> Small:
    """A model of float32 whose weights bfloat16 holds exactly."""
    load()
    torch.manual_seed(0)
    return Small().bfloat16().float().eval()


def in_halves(weight: torch.Tensor) -> packed_linear.Packing | None:
    return "halves" if packed_linear.has_halves(weight) else "packed"


def test_weights_in_halves_compute_as_whole_ones_and_take_half_of_the_memory(single):
    whole, parameters = copy.deepcopy(single), [*single.parameters()]
    before = sum(p.nbytes for p in (single.head.weight, single.inner["a"].weight))
    pack_linears(whole, contextlib.ExitStack())
    pack_linears(single, contextlib.ExitStack(), in_halves)
    assert packed_weights(single) == halved_weights(single) == 3
    assert sum(m.packed.nbytes for m in (single.head, single.inner["a"])) * 2 == before
    assert all(p.untyped_storage().nbytes() == 4 for p in (single.head.weight, parameters[0]))
    assert all(one is other for one, other in zip(parameters, single.parameters(), strict=True))
    with torch.no_grad(), halves_by("floats", load(strict=True)):
        for one, other in zip(single(IDS), whole(IDS), strict=True):
            assert torch.equal(one, other)


def test_a_weight_with_more_bits_stays_whole(single):
    with torch.no_grad():
        single.inner["a"].weight[3, 5] = 1 / 3
    pack_linears(single, contextlib.ExitStack(), in_halves)
    assert packed_weights(single) == 3 and halved_weights(single) == 2


def test_undoing_halves_gives_the_weights_back(single):
    modules = dict(single.named_modules())
    weights = {name: value.clone() for name, value in single.state_dict().items()}
    with contextlib.ExitStack() as undo:
        pack_linears(single, undo, in_halves)
    assert all(module is modules[name] for name, module in single.named_modules())
    assert all(parameter.requires_grad for parameter in single.parameters())
    for name, value in single.state_dict().items():
        assert value.dtype is torch.float32 and torch.equal(value, weights[name]), name


def test_the_state_of_halves_is_that_of_plain_weights_and_takes_what_they_hold(single):
    plain = {name: value.clone() for name, value in single.state_dict().items()}
    pack_linears(single, contextlib.ExitStack(), in_halves)
    for name, value in single.state_dict().items():
        assert value.dtype is torch.float32 and torch.equal(value, plain[name]), name
    other = {name: torch.randn_like(value).bfloat16().float() for name, value in plain.items()}
    other["head.weight"] = other["embedding.weight"]
    other["of_scaled.weight"] = other["scaled.weight"]
    single.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in single.state_dict().items())
    wrong = {**other, "inner.a.weight": other["inner.a.weight"] + 1 / 3}
    with pytest.raises(RuntimeError, match=r"for inner\.a\.weight weights that bfloat16 holds"):
        single.load_state_dict(wrong)
    assert torch.equal(single.state_dict()["inner.a.weight"], other["inner.a.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_halves_that_are_cast_are_what_the_whole_weights_are_cast_to(single, dtype):
    plain = copy.deepcopy(single).to(dtype)
    pack_linears(single, contextlib.ExitStack(), in_halves)
    single.to(dtype)
    with torch.no_grad():
        for one, other in zip(single(IDS), plain(IDS), strict=True):
            assert one.dtype is dtype
            torch.testing.assert_close(one, other)
    assert all(value.dtype is dtype for value in single.state_dict().values())
    single.float()
    with torch.no_grad():
        torch.testing.assert_close(single(IDS), plain.float()(IDS))


def test_the_rounding_of_a_model_in_halves_can_be_measured():
    model = small_model("llama").to(torch.bfloat16).float()
    plain = rounding_of(model, [3, 5, 7], last_logits(model, [3, 5, 7]))
    pack_linears(model, contextlib.ExitStack(), in_halves)
    assert halved_weights(model)
    rounding = rounding_of(model, [3, 5, 7], last_logits(model, [3, 5, 7]))
    torch.testing.assert_close(rounding.exact, plain.exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_cast_model_takes_its_own_state(single, dtype):
    pack_linears(single, contextlib.ExitStack(), in_halves)
    single.to(dtype)
    state = single.state_dict()
    single.load_state_dict(state)
    for name, value in single.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_model_whose_weights_are_all_in_16_bits_tells_its_dtype():
    load()
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(3)))
    model.bfloat16().float()
    pack_linears(model, contextlib.ExitStack(), in_halves)
    assert packed_weights(model) == halved_weights(model) == 3
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_model_that_does_not_tolerate_halves_is_packed_whole(monkeypatch, caplog):
    model = small_model("llama").to(torch.bfloat16).float()
    halve, unpack = packed_linear.halve, packed_linear.unpack
    monkeypatch.setattr(packed_linear, "halve", lambda weight: ~halve(weight))
    monkeypatch.setattr(
        packed_linear, "unpack", lambda w: unpack(~w if w.dtype is torch.int16 else w)
    )
    with caplog.at_level(logging.WARNING):
        paged = PagedCausalLM(model, cache_for(model, 5, 4), packs=in_halves)
    assert paged.packed and not paged.halved
    assert "weights are not packed in 16 bits" in caplog.text
