"""A model that would compute something else through the paged cache is not served."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.models.hf import ModelRefused, PagedCausalLM, cache_for
from compiled_attn.models.hf.equality import small_cache, step_logits
from compiled_attn.models.hf.rounding import last_logits
from compiled_attn.step import PartsLayout, Request, TableLayout
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.tiny import tiny_model


def _paged(model, layout=PartsLayout, kv_dtype=None):
    return PagedCausalLM(model, cache_for(model, 8, 4, dtype=kv_dtype), layout(8, 4, 2))


def previous_token(model):
    """The first layer also adds its input of the previous row, of any request."""
    layer = model.model.layers[0]
    plain = type(layer).forward

    class Shifted(type(layer)):
        def forward(self, hidden_states, *args, **kwargs):
            return plain(self, hidden_states, *args, **kwargs) + hidden_states.roll(1, dims=1)

    layer.__class__ = Shifted


def own_positions(model):
    """Counts positions from the start of what it gets, as models without ``position_ids`` do."""
    rotary = model.model.rotary_emb
    plain = type(rotary).forward

    class Counting(type(rotary)):
        def forward(self, x, position_ids):
            return plain(self, x, torch.arange(x.shape[1]).unsqueeze(0))

    rotary.__class__ = Counting


@pytest.mark.parametrize(
    ("mistake", "dtype"),
    [
        (previous_token, torch.float32),
        (own_positions, torch.float32),
        (own_positions, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("layout", [PartsLayout, TableLayout])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_a_mistake_in_the_code_of_a_model_is_found(mistake, layout, dtype, kv_dtype, request):
    if layout is TableLayout:
        request.getfixturevalue("ops")
    model = tiny_model().to(dtype)
    mistake(model)
    with pytest.raises(ModelRefused, match="same logits through the paged cache"):
        _paged(model, layout, kv_dtype)
    assert model.config._attn_implementation == "eager"
    assert "forward" not in model.model.layers[0].__dict__


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float64),
        ("gemma2", torch.float64),
        ("gemma2", torch.float16),
        ("gpt_oss", torch.float16),
        ("gpt_oss", torch.bfloat16),
        ("llama", torch.bfloat16),
    ],
)
def test_rounding_is_no_mistake(family, dtype):
    _paged(tiny_model(family).to(dtype))


def test_a_model_that_derives_positions_from_its_padding_is_refused():
    with pytest.raises(ModelRefused, match="computes others: they differ by"):
        _paged(small_model("roberta"))


def test_a_model_that_fails_by_itself_is_refused_with_its_error():
    model = tiny_model()
    model.lm_head = torch.nn.Linear(3, 3)
    with pytest.raises(ModelRefused, match=r"fails on 3 tokens \(RuntimeError"):
        _paged(model)


def test_a_model_without_finite_logits_is_refused():
    model = tiny_model()
    model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ModelRefused, match="not finite"):
        _paged(model)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "family",
    ["llama", "mixtral", "gpt_oss", "gemma4_text", "deepseek_v3", "granitemoe_swa", "mellum"],
)
def test_the_rounding_of_8_bits_is_no_mistake(family, kv_dtype):
    _paged(small_model(family), kv_dtype=kv_dtype)


def outlier(model, size):
    """An element of each value is far larger than the others, and nothing reads it."""
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.v_proj.bias[::16] = size
        attention.o_proj.weight[:, ::16] = 0


@pytest.mark.parametrize("layout", [PartsLayout, TableLayout])
@pytest.mark.parametrize(("kv_dtype", "size"), [(torch.int8, 3e3), (torch.float8_e4m3fn, 3e6)])
def test_a_model_that_does_not_tolerate_8_bits_is_refused_with_them_and_served_without(
    kv_dtype, size, layout, request
):
    if layout is TableLayout:
        request.getfixturevalue("ops")
    model = small_model("qwen2")
    outlier(model, size)
    with pytest.raises(ModelRefused, match=r"tolerates keys and values in .*kv_dtype 'auto'"):
        _paged(model, layout, kv_dtype)
    assert model.config._attn_implementation == "eager"
    _paged(model, layout)


@pytest.mark.parametrize("layout", [PartsLayout, TableLayout])
@pytest.mark.parametrize("length", [1, 4, 11])
def test_over_a_cache_of_its_own_dtype_a_text_has_the_logits_of_the_model(layout, length, ops):
    model, text = tiny_model(), [*range(1, 1 + length)]
    expected = last_logits(model, text)
    paged = PagedCausalLM(model, cache_for(model, 8, 4), layout(8, 4, 2))
    before = [buffer.clone() for buffer in paged.cache.buffers()]
    cache = small_cache(paged.cache, 4, 4, torch.float32)
    logits = step_logits(paged, cache, [Request(text, 0, [1, 2, 3][: -(-length // 4)])])[0]
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, before, paged.cache.buffers()))


def test_a_small_cache_has_the_layers_of_the_large_one():
    cache = cache_for(small_model("gemma4_text"), 8, 4)
    small = small_cache(cache, 3, 2, torch.int8)
    assert small.shapes == cache.shapes and small.is_quantised
    assert (small.num_blocks, small.block_size) == (3, 2)
