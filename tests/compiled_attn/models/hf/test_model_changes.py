"""A change of a model that an engine uses is an error."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch import nn

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models.hf import ModelChanged, PagedCausalLM, cache_for
from compiled_attn.models.hf.proof import check
from tests.compiled_attn.tiny import tiny_model


def layer(model, number=1):
    return model.model.layers[number]


def replace_a_weight(model):
    linear = layer(model).mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.clone(), requires_grad=False)


def replace_a_forward(module):
    module.forward = MethodType(type(module).forward, module)


def scale_an_attention(model):
    layer(model, 0).self_attn.scaling *= 2


CHANGES = {
    "a module": (
        lambda m: setattr(layer(m), "mlp", copy.deepcopy(layer(m).mlp)),
        r"model\.layers\.1\.mlp was replaced: restore it.* create a new engine",
    ),
    "an activation": (
        lambda m: setattr(layer(m).mlp, "act_fn", nn.Tanh()),
        r"model\.layers\.1\.mlp\.act_fn was replaced",
    ),
    "a hook": (
        lambda m: layer(m).register_forward_hook(lambda *arguments: None),
        r"the forward hooks of model\.layers\.1 changed",
    ),
    "a number": (scale_an_attention, r"model\.layers\.0\.self_attn\.scaling is \S+, was"),
    "the attention": (
        lambda m: m.set_attn_implementation("sdpa"),
        r"attention is 'sdpa' and was 'compiled_attn'.*set_attn_implementation",
    ),
    "the configuration of a layer": (
        lambda m: setattr(layer(m).self_attn, "config", copy.deepcopy(m.config)),
        r"layers\.1\.self_attn\.config was replaced",
    ),
    "the mode": (lambda m: m.train(), "training is True, was False: restore it"),
    "the mode of a layer": (
        lambda m: layer(m).self_attn.train(),
        r"layers\.1\.self_attn\.training is True, was False",
    ),
    "the dtype": (lambda m: m.to(torch.float64), "cast or moved: create a new engine"),
    "the dtype of a layer": (lambda m: layer(m).to(torch.bfloat16), "cast or moved"),
    "a weight": (replace_a_weight, r"a parameter was replaced.*copy_"),
    "the shape of a weight": (
        lambda m: setattr(m.model.norm, "weight", nn.Parameter(torch.ones(3), requires_grad=False)),
        "a parameter was replaced",
    ),
    "no weight": (lambda m: setattr(m.model.norm, "weight", None), "a parameter was replaced"),
    "a forward": (lambda m: replace_a_forward(layer(m)), r"layers\.1\.forward was replaced"),
    "no forward": (lambda m: delattr(layer(m, 0), "forward"), r"layers\.0\.forward was removed"),
    "the forward of an attention": (
        lambda m: replace_a_forward(layer(m, 0).self_attn),
        r"layers\.0\.self_attn\.forward was added",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_refused_with_what_changed(change, message):
    model = tiny_model()
    paged = PagedCausalLM(model, cache_for(model, 8, 4))
    paged.check_unchanged()
    change(model)
    with pytest.raises(ModelChanged, match=message):
        paged.check_unchanged()


def test_the_attention_of_a_nested_configuration_is_watched():
    model = tiny_model("gemma3_text")
    other = copy.deepcopy(model.config)
    model.model.layers[0].mlp.config = other  # not an attention module's
    paged = PagedCausalLM(model, cache_for(model, 8, 4))
    other._attn_implementation = "sdpa"
    with pytest.raises(ModelChanged, match="attention is 'sdpa'"):
        paged.check_unchanged()


def test_what_was_changed_and_put_back_is_unchanged():
    model = tiny_model()
    paged = PagedCausalLM(model, cache_for(model, 8, 4))
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    model.train()
    model.set_attn_implementation(before)
    model.eval()
    paged.check_unchanged()


def test_new_values_of_weights_are_the_users_right():
    model = tiny_model()
    paged = PagedCausalLM(model, cache_for(model, 8, 4))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.normal_()
    model.load_state_dict(tiny_model(seed=1).state_dict())
    paged.check_unchanged()


def test_remember_takes_the_model_as_it_is_now():
    model = tiny_model()
    paged = PagedCausalLM(model, cache_for(model, 8, 4))
    replace_a_weight(model)
    paged.remember()
    paged.check_unchanged()


def test_checking_texts_against_generate_leaves_the_model_unchanged():
    model = tiny_model()
    engine = Engine(model, EngineConfig(backend="eager", context=32, block_size=4, max_seqs=2))
    engine.warmup()
    results = list(engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=4)))
    assert not check(model, results, 2).mismatches
    engine.executor.module.check_unchanged()


class Adapted(nn.Linear):
    """A linear layer with the attributes of peft's ``LoraLayer``, by which it is known."""

    def __init__(self, like: nn.Linear):
        super().__init__(like.in_features, like.out_features, bias=False, dtype=like.weight.dtype)
        self.weight = like.weight
        self._active_adapter, self._disable_adapters, self.merged_adapters = ["a"], False, []


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "_active_adapter", ["b"]),
        lambda layer: layer._active_adapter.append("b"),
        lambda layer: setattr(layer, "_disable_adapters", True),
        lambda layer: layer.merged_adapters.append("a"),
    ],
    ids=["set_adapter", "both", "disable_adapter", "merge_adapter"],
)
def test_another_adapter_after_the_warmup_is_noticed(change):
    model = tiny_model()
    parent = model.model.layers[1].self_attn
    parent.q_proj = layer = Adapted(parent.q_proj)
    engine = Engine(model, EngineConfig(backend="eager", max_seqs=2, max_tokens_per_step=8))
    engine.warmup()
    assert len([*engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))]) == 1
    change(layer)
    with pytest.raises(ModelChanged, match="other adapters are active, merged or switched off"):
        [*engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))]
