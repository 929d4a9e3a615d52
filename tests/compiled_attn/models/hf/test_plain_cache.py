"""Plain caches that round to 8 bits: the logits of a model whose keys and values are rounded."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.models.hf import PagedCausalLM, cache_for
from compiled_attn.models.hf.equality import small_cache, step_logits
from compiled_attn.models.hf.plain_cache import fresh_cache
from compiled_attn.models.hf.rounding import last_logits
from compiled_attn.step import Request
from tests.compiled_attn.engine.rounded import KINDS, rounded_logits
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.tiny import tiny_model

TEXT = [*range(3, 20)]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_dense_attention_to_rounded_keys_and_values(kind, family):
    model = tiny_model(family)
    rows = rounded_logits(model, TEXT, kind)[-1].double()
    with torch.no_grad():
        rounded = last_logits(model, TEXT, KINDS[kind])
    assert (rounded - rows).std() <= 2e-3 * rows.std()  # an element halfway between two values
    assert (rounded - last_logits(model, TEXT)).std() > 4e-3 * rows.std()


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3n_text", "deepseek_v3", "jamba", "lfm2"])
def test_windows_shared_layers_and_latents_are_rounded_as_the_paged_cache_does(family, ops):
    model = small_model(family)
    with torch.no_grad():
        rounded = last_logits(model, TEXT, torch.int8)
        plain = last_logits(model, TEXT)
    paged = PagedCausalLM(model, cache_for(model, 8, 4))
    cache = small_cache(paged.cache, 8, 4, torch.int8)
    request = Request(TEXT, 0, [1, 2, 3, 4, 5], state_slot=1)
    logits = step_logits(paged, cache, [request])[0].double()
    assert (logits - rounded).std() < 0.1 * (rounded - plain).std()


def test_a_row_of_zeros_stays_one():
    cache = fresh_cache(torch.nn.Identity(), torch.int8)["past_key_values"]
    keys, values = cache.update(torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert torch.equal(keys, torch.zeros(1, 1, 2, 4))
    assert torch.equal(values, torch.ones(1, 1, 2, 4))
    assert fresh_cache(torch.nn.Identity(), None) == {}
