"""Steps outside of an engine: the logits of a text are those of the model by itself."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.hf import PagedCausalLM, cache_for
from compiled_attn.hf.equality import small_cache, step_logits
from compiled_attn.hf.rounding import last_logits
from compiled_attn.step import PartsLayout, Request, TableLayout
from tests.compiled_attn.hf.families import small_model
from tests.compiled_attn.tiny import tiny_model


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
