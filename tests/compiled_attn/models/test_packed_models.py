"""Served models with packed layers: trial, fallback and check."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch import nn

from compiled_attn.errors import ModelRefused
from compiled_attn.models import packed
from compiled_attn.models.hf import PagedCausalLM, cache_for, equality
from compiled_attn.models.hf.proof import check
from compiled_attn.models.hf.rounding import last_logits, rounding_of
from compiled_attn.models.packed import (
    PackedLinear,
    pack_linears,
    packed_weights,
)
from compiled_attn.ops import load, packed_linear
from compiled_attn.ops.quantised_linear import quantise
from graphs.store.values import describe
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.models.hf.test_proof import Result
from tests.compiled_attn.models.packing import (
    KINDS,
    as_bf16_widen,
    assert_state,
    state_of,
)
from tests.compiled_attn.tiny import plain_generate


def llama(kind: str) -> nn.Module:
    load()
    return small_model("llama").to(torch.bfloat16).to(KINDS[kind].dtype)


@pytest.mark.parametrize("kind", ["packed", "bf16-widen"])
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


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_check_of_rounded_layers_compares_with_plain_ones_of_rounded_weights(kind):
    model, prompt = llama(kind), [3, 5, 7, 11]
    pack_linears(model, contextlib.ExitStack(), KINDS[kind].packing)
    results = [Result(0, prompt, plain_generate(model, prompt, 8))]
    assert not check(model, results, 1).mismatches


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_graphs_of_a_packed_model_are_found_in_the_store_by_another_process(kind):
    # Two models in memory have addresses as different as those of two processes.
    torch.manual_seed(0)
    models = [llama(kind) for _ in range(2)]
    paged = [PagedCausalLM(m, cache_for(m, 5, 4), packs=KINDS[kind].packing) for m in models]
    assert paged[0].packed
    assert describe(paged[0]).digest == describe(paged[1]).digest


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
    model, halve, unpack = llama("bf16-widen"), packed_linear.pack_bf16, packed_linear.unpack
    monkeypatch.setattr(packed_linear, "pack_bf16", lambda weight: ~halve(weight))
    monkeypatch.setattr(
        packed_linear, "unpack", lambda w: unpack(~w if w.dtype is torch.int16 else w)
    )
    with caplog.at_level(logging.WARNING):
        paged = PagedCausalLM(model, cache_for(model, 5, 4), packs=as_bf16_widen)
    assert paged.packed and not paged.widened
    assert "weights are not packed in 16 bits" in caplog.text


def test_a_model_that_does_not_tolerate_int8_is_refused_and_left_unchanged(monkeypatch):
    model = llama("int8")
    state = state_of(model)
    monkeypatch.setattr(packed, "quantise", lambda weight, bits: quantise(-weight, bits))
    with pytest.raises(ModelRefused, match="tolerates quantised weights"):
        PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_rounded("int8"))
    assert_state(model, state)
    assert not packed_weights(model)


def test_weights_of_4_bits_may_change_logits_more_than_those_of_8(monkeypatch):
    def distances(paged, *_):  # 0.8: as of SmolLM2-135M
        return torch.full((12,), 0.8 if packed.quantised_weights(paged.model) else 0.0)

    monkeypatch.setattr(equality, "_distances", distances)
    model = llama("int4")
    paged = PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_rounded("int4"))
    assert paged.quantised
    model = llama("int8")
    with pytest.raises(ModelRefused, match="tolerates quantised weights"):
        PagedCausalLM(model, cache_for(model, 5, 4), packs=packed_linear.as_rounded("int8"))
