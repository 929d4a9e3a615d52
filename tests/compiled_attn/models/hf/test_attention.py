"""Multi-head latent attention stores latents, and computes what expanded keys compute."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.cache.kv_cache import KVShape
from compiled_attn.models.hf import PagedCausalLM, cache_for
from compiled_attn.models.hf.attention import absorb, latent_shape
from compiled_attn.step import PartsLayout, TableLayout
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.models.hf.survey import serve
from tests.compiled_attn.tiny import plain_generate

MLA = ["deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3"]


@pytest.mark.parametrize("family", MLA)
def test_the_cache_of_latent_attention_is_one_head_of_latents(family):
    model = small_model(family)
    cache = cache_for(model, 4, 4)
    assert set(cache.shapes) == {KVShape(1, 32 + 8, None)} and not cache.has_value


@pytest.mark.parametrize("family", MLA)
@pytest.mark.parametrize("layout", [PartsLayout, TableLayout])
def test_latents_pass_the_equality_with_the_unmodified_model(family, layout, request):
    if layout is TableLayout:
        request.getfixturevalue("ops")
    model = small_model(family)
    PagedCausalLM(model, cache_for(model, 8, 4), layout(8, 4, 2))


def test_absorbed_scores_and_values_are_those_of_the_expanded_keys():
    module = small_model("deepseek_v3").model.layers[0].self_attn.double()
    chance = torch.Generator().manual_seed(0)
    latent, rotated, query = (
        torch.randn(1, heads, 5, size, generator=chance, dtype=torch.float64)
        for heads, size in ((1, 32), (1, 8), (4, 24))
    )
    key, value = module.expand_kv(latent, rotated)
    absorbed, projection = absorb(module, query)
    stored = torch.cat((latent, rotated), dim=-1)
    torch.testing.assert_close(absorbed @ stored.mT, query @ key.mT)
    torch.testing.assert_close(latent @ projection, value)


def test_the_model_still_generates_by_itself_while_it_is_served():
    model = small_model("deepseek_v3")
    prompt = [5, 9, 77, 3]
    before = plain_generate(model, prompt, 6)
    PagedCausalLM(model, cache_for(model, 8, 4))
    model.set_attn_implementation("eager")
    assert plain_generate(model, prompt, 6) == before


def test_a_projection_that_is_not_plainly_linear_is_expanded():
    module = small_model("deepseek_v3").model.layers[0].self_attn
    assert latent_shape(module) is not None
    module.kv_b_proj = torch.nn.Sequential(module.kv_b_proj)
    assert latent_shape(module) is None


@pytest.mark.parametrize("kernel", ["portable", "native"])
def test_an_engine_serves_latents_with_shared_prefixes(kernel, request):
    if kernel == "native":
        request.getfixturevalue("ops")
    model = small_model("deepseek_v3")
    expected, tokens = serve(model, kernel, {})
    assert tokens == expected
