"""Only layers that are alike share compiled code, and any model is captured as it is."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from compiled_attn.engine import Engine, EngineConfig
from compiled_attn.models.hf import PagedCausalLM, cache_for
from compiled_attn.models.hf.region_keys import region_keys
from compiled_attn.step import TableLayout
from graphs import capture
from graphs.torch_internals.regions import REGION_REUSE
from tests.compiled_attn.tiny import FAMILIES, tiny_model
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_gradients")

LAYERS, BLOCKS, SIZE, WIDTH = 3, 8, 4, 6


def paged(family="llama", change=lambda layers: None, layers=LAYERS) -> PagedCausalLM:
    """A model to which a change was made before."""
    types = FAMILIES[family].get("layer_types")
    sizes = {"layer_types": [*types, types[0]]} if types else {}
    model = tiny_model(family, num_hidden_layers=layers, **sizes)
    change(model.model.layers)
    return PagedCausalLM(model, cache_for(model, BLOCKS, SIZE), TableLayout(BLOCKS, SIZE, WIDTH))


def keys(module: PagedCausalLM) -> tuple[int | None, ...]:
    return region_keys(module._layers, module._numbers, module.cache, reads_numbers=False)


def check_captured(module: PagedCausalLM) -> None:
    """The graph of a step computes what the model does eagerly."""
    step = module.layout.padding({"tokens": 6, "requests": 2})
    step = step._replace(
        input_ids=torch.arange(6), positions=torch.tensor([0, 1, 2, 0, 1, 2]),
        slot_mapping=torch.arange(SIZE, SIZE + 6), logits_index=torch.tensor([2, 5]),
        block_tables=torch.tensor([[1, 2, 0, 0, 0, 0], [3, 4, 0, 0, 0, 0]], dtype=torch.int32),
        seq_lens=torch.tensor([3, 3], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 3, 6], dtype=torch.int32),
    )  # fmt: skip
    graph = capture(module, [*step], backend="aot_eager")
    torch.testing.assert_close(graph.run(*step), module(*step), rtol=1e-4, atol=1e-4)


def hook(layer):
    layer.mlp.register_forward_hook(lambda module, args, output: output + 1)


def hook_of_the_layer(layer):
    layer.register_forward_hook(lambda module, args, output: output * 2)


class Doubling(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


class LoRA(nn.Module):
    """As people write it by hand."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(4, linear.in_features) / 8, requires_grad=False)
        self.b = nn.Parameter(torch.randn(linear.out_features, 4) / 8, requires_grad=False)

    def forward(self, x):
        return self.linear(x) + x @ self.a.T @ self.b.T


def lora(layer):
    layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)


class Scaled(nn.Linear):
    """Reads an attribute of its weight."""

    def forward(self, x):
        return super().forward(x) * self.weight.scale


class Shared:
    count = 0


class Counting(nn.SiLU):
    """Passes Python state to the next layer."""

    def forward(self, x):
        self.shared.count = (self.shared.count + 1) % LAYERS
        return super().forward(x) * (1 + self.shared.count)


def count_calls(layers):
    shared = Shared()
    for layer in layers:
        layer.mlp.act_fn = Counting()
        layer.mlp.act_fn.shared = shared


def test_layers_that_write_to_python_objects_are_computed_as_they_are():
    check_captured(paged(change=count_calls))


def constant_class(number):
    class Constant:
        scale = 1.0 + number

    return Constant


class ByClass(nn.SiLU):
    def forward(self, x):
        return super().forward(x) * self.kind.scale


def scale_weights(layers):
    for number, layer in enumerate(layers):
        layer.mlp.up_proj.__class__, layer.mlp.up_proj.weight.scale = Scaled, 1.0 + number


def classes_of_one_name(layers):
    for number, layer in enumerate(layers):
        layer.mlp.act_fn = ByClass()
        layer.mlp.act_fn.kind = constant_class(number)


ALL_DIFFER = (scale_weights, classes_of_one_name)


@pytest.mark.parametrize("change", ALL_DIFFER)
def test_layers_that_all_differ_have_a_key_each(change):
    assert keys(paged(change=change)) == (0, 1, 2)


# Layers that have a key each are captured alike.
@pytest.mark.parametrize("change", slow_but((scale_weights,), ALL_DIFFER))
def test_layers_that_all_differ_are_computed_as_they_are(change):
    check_captured(paged(change=change))


CHANGES = {
    "a constant": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 1.0),
    "a scale": lambda layer: setattr(layer.self_attn, "scaling", 0.01),
    "a module of another class": lambda layer: setattr(layer.mlp, "act_fn", Doubling()),
    "a bias": lambda layer: setattr(
        layer.mlp.up_proj, "bias", nn.Parameter(torch.ones(96), requires_grad=False)
    ),
    "a parameter of another layout": lambda layer: setattr(
        layer.mlp.up_proj,
        "weight",
        nn.Parameter(layer.mlp.up_proj.weight.t().contiguous().t(), requires_grad=False),
    ),
    "one parameter in two modules": lambda layer: setattr(
        layer.mlp.up_proj, "weight", layer.mlp.gate_proj.weight
    ),
    "a hook": hook,
    "a hook of the layer": hook_of_the_layer,
}


def test_layers_that_are_alike_have_one_key():
    assert keys(paged()) == (0, 0, 0)


def test_layers_of_another_window_have_another_key():
    assert keys(paged("gemma3_text")) == (0, 1, 0)


def change_between(layers):
    for change, layer in zip(CHANGES.values(), layers[1:-1], strict=True):
        change(layer)


def test_layers_that_differ_have_another_key_and_are_computed_as_they_are(caplog):
    module = paged(change=change_between, layers=2 + len(CHANGES))
    assert keys(module) == (*range(1 + len(CHANGES)), 0)
    with caplog.at_level(logging.WARNING):
        check_captured(module)
    assert not caplog.messages or not REGION_REUSE.is_on, "captured without what is tested"


def test_a_layer_with_an_adapter_has_another_key_and_is_computed_as_it_is():
    module = paged(change=lambda layers: lora(layers[1]))
    assert keys(module) == (0, 1, 0)
    check_captured(module)


# Windows, sinks and experts; Llama's layers are captured below, all families for test_model too.
@pytest.mark.parametrize("family", slow_but(("gpt_oss",), FAMILIES))
def test_families_are_captured_as_they_compute(family):
    check_captured(paged(family))


# One layer with each of the others is captured above.
@pytest.mark.parametrize("change", slow_but((hook,), (hook, hook_of_the_layer, lora)))
def test_layers_that_all_have_hooks_or_adapters_are_captured(change, caplog):
    module = paged(change=lambda layers: [*map(change, layers)])
    with caplog.at_level(logging.WARNING):
        check_captured(module)
    assert len(caplog.messages) <= 1


def multiply_by_number(layers):
    class Numbered(type(layers[0].mlp)):
        def forward(self, x):
            return super().forward(x) * self.layer_idx

    for number, layer in enumerate(layers):
        layer.mlp.__class__, layer.mlp.layer_idx = Numbered, number


def test_a_forward_that_reads_the_number_of_its_layer_shares_nothing():
    module = paged(change=multiply_by_number)
    assert module._reads_numbers
    (variant, _) = module.capture_variants()
    assert len({*variant._keys}) == LAYERS
    check_captured(module)


def test_a_hook_that_comes_after_the_model_was_made_is_computed():
    module = paged()
    hook(module.model.model.layers[2])
    check_captured(module)


def test_an_engine_shares_traces_in_graphs_of_symbolic_sizes():
    if not REGION_REUSE.is_on:
        pytest.skip(REGION_REUSE.why_off)
    config = EngineConfig(context=64, max_seqs=4, max_graphs=6, backend="aot_eager")
    engine = Engine(tiny_model(num_hidden_layers=LAYERS), config)
    engine.warmup()
    assert REGION_REUSE.is_on, REGION_REUSE.why_off
    assert (engine.report().graphs, engine.report().compiled_graphs) == (6, 1)
