"""The generation loop of examples/paged_generation.py, against contiguous caches and `generate`."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from compiled_attn import PagedKVCache
from compiled_attn.cache.blocks import OutOfBlocks
from compiled_attn.models import default_model

PATH = Path(__file__).resolve().parents[1] / "examples" / "paged_generation.py"
NEW = 20


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(PATH))


@pytest.fixture(scope="module")
def model():
    return default_model()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4096, (n,), generator=generator) for n in (5, 48, 17, 32)]


@pytest.fixture(scope="module")
def expected(example, model, prompts):
    """The texts over contiguous caches; some end early, one has all tokens that it may."""
    texts = [example["generate_contiguous"](model, prompt, NEW) for prompt in prompts]
    assert min(map(len, texts)) < max(map(len, texts)) == NEW
    return texts


def cache_of(model, num_blocks, size):
    config = model.config
    shape = config.num_hidden_layers, num_blocks, size
    cache = PagedKVCache(*shape, config.num_key_value_heads, config.head_dim)
    for buffer in cache.buffers():
        buffer.fill_(torch.nan)  # what was never written must not be seen
    return cache


@pytest.mark.parametrize("size", [1, 5, 16, 64])
def test_texts_over_a_paged_cache_equal_those_over_a_contiguous_one(
    example, model, prompts, expected, size
):
    num_blocks = 1 + sum(-(-(len(prompt) + NEW) // size) for prompt in prompts)
    cache = cache_of(model, num_blocks, size)
    assert example["generate"](model, prompts, cache, NEW) == expected


def test_the_contiguous_loop_equals_plain_generate(example, model, prompts, expected):
    ends = list(range(example["END"]))
    for prompt, text in zip(prompts, expected, strict=True):
        out = model.generate(
            prompt.unsqueeze(0),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
        )
        assert out[0, len(prompt) :].tolist() == text


def test_finished_texts_make_room_for_the_others(example, model, prompts, expected):
    """Two blocks more than the prompts take are enough, because finished texts free theirs."""
    size = 16
    num_blocks = 1 + sum(-(-len(prompt) // size) for prompt in prompts)
    with pytest.raises(OutOfBlocks):
        example["generate"](model, prompts, cache_of(model, num_blocks, size), NEW)
    cache = cache_of(model, num_blocks + 2, size)
    assert example["generate"](model, prompts, cache, NEW) == expected


def test_the_example_prints_that_every_text_is_the_same(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [PATH.name, "--block-size", "8", "--tokens", "10"])
    runpy.run_path(str(PATH), run_name="__main__")
    out = capsys.readouterr().out
    texts = [json.loads(text) for text in re.findall(r"^prompt \d, \d+ tokens: (.*)$", out, re.M)]
    assert [len(text) for text in texts] == [10, 7, 5, 10]
    assert out.count("the same as over a contiguous cache: True") == 4
