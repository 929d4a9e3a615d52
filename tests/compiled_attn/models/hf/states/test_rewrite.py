"""A rewritten mixer computes what its model does, and an unknown one is refused by name."""

from __future__ import annotations

import inspect
import traceback
from types import MethodType

import pytest
import torch

from compiled_attn.models.hf.states.carrier import Carrier, StateRecorder
from compiled_attn.models.hf.states.rewrite import (
    RewriteError,
    carrier_name,
    is_rewritten,
    rewrite,
    uses,
)
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.models.hf.states import mixers

FAMILIES = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling_text"),
    *("jamba", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2"),
    *("nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    "zamba2",
)
IDS = torch.arange(3, 9).unsqueeze(0)


def rewritten(family):
    """A model whose mixers are rewritten, and their names."""
    model, names = small_model(family), set()
    for module in model.modules():
        if uses(type(module).forward):
            module.forward = MethodType(rewrite(type(module).forward, 0).forward, module)
            names.add(type(module).__name__)
    return model, names


@pytest.mark.parametrize("family", FAMILIES)
def test_under_an_empty_cache_every_mixer_gives_the_bits_of_its_model(family):
    model, names = rewritten(family)
    assert len(names) == 1
    with torch.no_grad():
        expected = small_model(family)(input_ids=IDS, use_cache=False).logits
        cache = {carrier_name(model.forward): Carrier()}
        assert torch.equal(model(input_ids=IDS, use_cache=False, **cache).logits, expected)


@pytest.mark.parametrize("family", ["lfm2", "mamba", "qwen3_next", "falcon_h1"])
def test_under_a_cache_of_transformers_a_rewritten_model_generates_as_before(family):
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = small_model(family).generate(IDS, **options)
    assert torch.equal(rewritten(family)[0].generate(IDS, **options), expected)


@pytest.mark.parametrize(
    ("mixer", "name"),
    [
        (mixers.Since524, "cache"),
        (mixers.Mamba523, "cache_params"),
        (mixers.Short523, "past_key_values"),
    ],
)
def test_the_cache_has_the_name_of_each_version_of_transformers(mixer, name):
    assert carrier_name(mixer.forward) == name
    x, recorder = torch.randn(1, 4, 5), StateRecorder()
    out = rewrite(mixer.forward, 3).forward(mixer(), x, **{name: recorder})
    assert torch.equal(out, mixer().forward(x))
    ((call),) = recorder.calls
    assert (call.number, call.kind, call.shape, call.dtype) == (3, "conv", (4, 2), torch.float32)


def test_defaults_are_those_of_the_forward():
    forward = rewrite(mixers.Since524.forward, 0).forward
    x = torch.randn(1, 4, 5)
    assert torch.equal(forward(None, x, scale=1.0) * 2, forward(None, x))


@pytest.mark.parametrize(
    ("mixer", "reason"),
    [
        (mixers.Unknown, "calls mamba3_scan, which is not known here"),
        (mixers.Twice, "calls mamba2_chunk_scan, mamba2_chunk_scan in one forward"),
        (mixers.Heads, "calls mamba2_chunk_scan in a loop"),
        (mixers.NoCache, "has no argument cache or past_key_values or cache_params"),
        (mixers.with_closure(2.0), "has a forward that is not a plain function"),
    ],
)
def test_a_forward_that_mixes_tokens_in_another_way_is_refused_with_the_reason(mixer, reason):
    with pytest.raises(RewriteError, match=reason):
        rewrite(mixer.forward, 0)


def test_a_forward_without_source_is_refused():
    names = {}
    exec("def forward(self, x, cache=None): return causal_conv1d_fn(x)", names)
    with pytest.raises(RewriteError, match="has no source"):
        rewrite(names["forward"], 0)


def test_equal_layers_share_one_function_with_a_source_of_its_own():
    forward = rewrite(mixers.Mamba523.forward, 0).forward
    assert rewrite(mixers.Mamba523.forward, 0).forward is forward
    assert rewrite(mixers.Mamba523.forward, 1).forward is not forward
    assert is_rewritten(forward) and not is_rewritten(mixers.Mamba523.forward)
    assert "(causal_conv1d_fn, cache_params, 0, x, " in inspect.getsource(forward)


def test_an_error_in_a_rewritten_forward_shows_its_line():
    with pytest.raises(TypeError) as error:
        rewrite(mixers.Mamba523.forward, 0).forward(None, "text")
    text = "".join(traceback.format_exception(error.value))
    assert "return _compiled_attn_causal_conv1d_fn(" in text
