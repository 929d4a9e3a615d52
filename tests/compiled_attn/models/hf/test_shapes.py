"""The cache shapes and the context of a model."""

from __future__ import annotations

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from compiled_attn import PagedKVCache
from compiled_attn.cache.kv_cache import KVShape
from compiled_attn.engine import ConfigError, Engine, EngineConfig
from compiled_attn.models.hf import ModelRefused, PagedCausalLM, cache_for, context_limit
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.tiny import tiny_model


def test_the_cache_has_the_sizes_of_the_model():
    cache = cache_for(tiny_model(), num_blocks=8, block_size=4)
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (2, 2, 16)
    assert cache.shapes == (KVShape(2, 16, 16),) * 2


def test_looking_at_a_model_leaves_it_as_it_was():
    model = tiny_model().train()
    cache_for(model, 8, 4)
    assert model.training and model.config._attn_implementation == "eager"
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_heads_are_counted_where_the_configuration_says_otherwise():
    model = small_model("jetmoe")
    assert model.config.num_key_value_heads == 2
    assert cache_for(model, 4, 4).shapes[0].num_kv_heads == 4


def test_layers_may_differ_and_those_that_share_keys_have_no_buffers():
    cache = cache_for(small_model("gemma4_text"), 4, 4)
    assert cache.shapes == (
        KVShape(2, 16, 16),
        KVShape(2, 32, 32),
        KVShape(2, 16, 16, same_as=0),
        KVShape(2, 32, 32, same_as=1),
    )
    assert cache.key(2) is cache.key(0) and cache.value(3) is cache.value(1)
    assert cache.bytes_per_block == sum(buffer[:4].nbytes for buffer in cache.buffers())


def test_values_may_be_smaller_than_keys():
    model = small_model("deepseek_v3")
    for layer in model.model.layers:  # not plainly linear, and so not stored as latents
        layer.self_attn.kv_b_proj = torch.nn.Sequential(layer.self_attn.kv_b_proj)
    cache = cache_for(model, 4, 4)
    assert cache.shapes[0] == KVShape(4, 24, 16)
    assert cache.key(0).shape == (16, 4, 24) and cache.value(0).shape == (16, 4, 16)


def test_a_cache_of_another_model_is_refused_with_both_shapes():
    model = tiny_model()
    with pytest.raises(ValueError, match=r"layer 0 .* got \(2, 8, 8\): create it with cache_for"):
        PagedCausalLM(model, PagedKVCache(2, 8, 4, 2, 8))
    with pytest.raises(ValueError, match=r"layer 1 .*got None"):
        PagedCausalLM(model, PagedKVCache(1, 8, 4, 2, 16))
    assert model.config._attn_implementation == "eager"


def test_an_encoder_decoder_is_called_one():
    config = T5Config(d_model=32, num_layers=1, num_heads=2, vocab_size=64, d_kv=16, d_ff=64)
    with pytest.raises(ModelRefused, match="got a T5ForConditionalGeneration which is an encoder-"):
        cache_for(T5ForConditionalGeneration(config).eval(), 4, 4)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("diffllama", r"several calls a step of layers \{0: 2, 1: 2\}"),
        ("hrm_text", "several calls a step"),
        ("doge", "DogeAttention that builds a mask of its own"),
        ("llama4_text", "layers of type chunked_attention"),
        ("bloom", "attention code of its own, which does not use AttentionInterface"),
        ("deepseek_v4", "layers of type heavily_compressed_attention"),
    ],
)
def test_a_model_that_a_paged_cache_cannot_serve_is_refused_with_the_reason(family, reason):
    model = small_model(family)
    with pytest.raises(ModelRefused, match=reason):
        cache_for(model, 4, 4)


def test_a_window_that_only_the_mask_knows_is_seen_in_a_short_prompt():
    model = small_model("phimoe", sliding_window=100)
    with pytest.raises(ModelRefused, match="sees other tokens than all before it"):
        cache_for(model, 4, 4)
    cache_for(small_model("phimoe", sliding_window=None), 4, 4)


def test_a_model_whose_own_cache_forgets_what_its_layers_see_is_refused():
    with pytest.raises(ModelRefused, match=r"layer 0 sees all before it, .* cache stores 9 tokens"):
        cache_for(small_model("moshi"), 4, 4)


def test_a_layer_with_an_indexer_is_refused_before_its_prompts_are_long_enough_to_differ():
    model = tiny_model()
    model.model.layers[0].self_attn.indexer = torch.nn.Identity()
    with pytest.raises(ModelRefused, match="with its indexer"):
        cache_for(model, 4, 4)


def test_a_position_bias_is_not_dropped_in_silence():
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    plain = type(attention).forward

    class Biased(type(attention)):
        def forward(self, hidden_states, **kwargs):
            bias = torch.zeros(1)
            return plain(self, hidden_states, **kwargs, position_bias=bias)

    attention.__class__ = Biased
    with pytest.raises(ModelRefused, match="Biased that also passes position_bias"):
        cache_for(model, 4, 4)


# Contexts end where a rotary embedding would change for all requests of a step.


def _longrope():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    return small_model(
        "phi3",
        original_max_position_embeddings=64,
        rope_parameters={"rope_theta": 1e4, "rope_type": "longrope", **factors},
    )


def test_a_context_ends_where_one_long_request_would_change_the_others():
    assert context_limit(_longrope()) == 64
    with pytest.raises(ConfigError, match="context <= 64"):
        Engine(_longrope(), EngineConfig(backend="eager", context=65))


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn"])
def test_other_rotary_embeddings_have_the_context_of_the_model(kind):
    rope = {"rope_theta": 1e4, "rope_type": kind, "factor": 2.0}
    assert context_limit(small_model("llama", rope_parameters=rope)) == 256


def test_limits_of_each_kind_of_layer_count():
    model = small_model("gemma3_text")
    model.config.rope_parameters = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default"},
    }
    assert context_limit(model) == 32


def test_a_configuration_without_positions_has_no_limit():
    model = small_model("xlnet")
    assert context_limit(model) is None
