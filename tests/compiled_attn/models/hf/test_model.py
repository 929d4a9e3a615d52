"""Hugging Face models on the paged cache: logits and errors."""

from __future__ import annotations

import pytest
import torch

from compiled_attn import BatchBuilder, Request
from compiled_attn.models.hf import ATTENTION_NAME, ModelRefused, PagedCausalLM, cache_for
from compiled_attn.step import PartsLayout, TableLayout
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.tiny import FAMILIES, tiny_model
from tests.slow import slow_but

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def _reference(model, prompt: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_chunks_and_decodes_equal_the_unmodified_model(family):
    prompts = [[5, 9, 77, 3] * 7, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
    expected = [_reference(tiny_model(family), prompt) for prompt in prompts]
    model = tiny_model(family)
    module = PagedCausalLM(model, cache_for(model, num_blocks=32, block_size=4))
    builder = BatchBuilder(32, 4)
    tables = [[3, 9, 4, 8, 21, 20, 1], [7, 6, 5]]
    steps = [
        [(0, 0, 13), (1, 0, 1)],
        [(0, 13, 26), (1, 1, 10)],
        [(0, 26, 27), (1, 10, 11)],
        [(0, 27, 28)],
    ]
    for step in steps:
        requests = [Request(prompts[i][a:b], a, tables[i], num_logits=b - a) for i, a, b in step]
        need = builder.need(requests)
        batch = builder.build(requests, {axis: n + 3 for axis, n in need.items()})
        with torch.no_grad():
            logits = module(*batch)[: need["logits"]]
        rows = torch.cat([expected[i][a:b] for i, a, b in step])
        torch.testing.assert_close(logits, rows, atol=2e-5, rtol=2e-5)


def test_the_model_refuses_to_run_without_the_paged_step():
    model = tiny_model()
    PagedCausalLM(model, cache_for(model, 8, 4))
    with pytest.raises(ValueError, match="PagedCausalLM"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_batch_that_is_not_flattened_is_refused():
    model = tiny_model()
    module = PagedCausalLM(model, cache_for(model, 8, 4))
    step = BatchBuilder(8, 4).build([Request([1, 2], 0, [3])])
    from compiled_attn.models.hf import PagedStep

    with pytest.raises(ValueError, match="flattened"):
        model(
            torch.tensor([[1, 2], [3, 4]]),
            use_cache=False,
            paged=PagedStep.of(module.cache, step.metadata(4), ()),
        )


@pytest.mark.parametrize("family", slow_but(("gpt_oss",), ("llama", "gemma2", "gpt_oss")))
def test_a_step_is_one_graph_without_breaks_and_writes_the_cache_in_place(family):
    model = tiny_model(family)
    module = PagedCausalLM(model, cache_for(model, 16, 4))
    step = BatchBuilder(16, 4).build([Request([1, 2, 3], 0, [3]), Request([9], 2, [5])])
    with torch.no_grad():
        expected = module(*step)
        written = module.cache.key(1).clone()
        module.cache.key(1).zero_()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(*step), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(module.cache.key(1), written, atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", PartsLayout(16, 4)),
        ("gemma4_text", TableLayout(16, 4, 2)),
        ("nemotron", PartsLayout(16, 4)),
        pytest.param("deepseek_v3", TableLayout(16, 4, 2), marks=SLOW),
        pytest.param("gemma4_text", PartsLayout(16, 4), marks=SLOW),
        pytest.param("nemotron", TableLayout(16, 4, 2), marks=SLOW),
    ],
)
def test_latents_shared_keys_and_carried_steps_are_one_graph_too(family, layout, request):
    if isinstance(layout, TableLayout):
        request.getfixturevalue("ops")
    model = small_model(family)
    module = PagedCausalLM(model, cache_for(model, 16, 4), layout)
    requests = [Request([1, 2, 3], 0, [3]), Request([9], 2, [5])]
    step = layout.plan(BatchBuilder(16, 4).rows_of(requests)).fill()
    with torch.no_grad():
        expected = module(*step)
        compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(*step), expected, atol=1e-5, rtol=1e-5)


def test_a_refused_model_is_as_it_was():
    model = small_model("roberta").train()
    with pytest.raises(ModelRefused):
        PagedCausalLM(model, cache_for(model, 8, 4))
    assert model.training and model.config._attn_implementation == "eager"
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_a_model_may_be_served_a_second_time():
    model = tiny_model()
    first = PagedCausalLM(model, cache_for(model, 8, 4))
    second = PagedCausalLM(model, cache_for(model, 16, 4))
    step = BatchBuilder(8, 4).build([Request([1, 2, 3], 0, [3])])
    with torch.no_grad():
        assert torch.equal(first(*step), second(*step))
