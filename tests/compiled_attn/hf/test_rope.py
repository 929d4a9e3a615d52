"""Contexts end where a rotary embedding would change for all requests of a step."""

from __future__ import annotations

import pytest

from compiled_attn.engine import ConfigError, Engine, EngineConfig
from compiled_attn.hf import context_limit
from tests.compiled_attn.hf.families import small_model


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
