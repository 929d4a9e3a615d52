"""A real model, SmolLM2-135M-Instruct, from the package that holds it as a GGUF file."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from compiled_attn import LLM
from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.errors import ModelError
from compiled_attn.models import plain_folder

TEXTS = [
    *("The capital of France is", "def fibonacci(n):", "import numpy as np\n", "Water boils at"),
    *("Q: What is 2 + 2?\nA:", "SELECT name FROM users WHERE", "東京は", "🎉 Happy", "1, 2, 3, 4,"),
]
QUESTIONS = ["What is the capital of France?", "Name a fruit."]
COUNT = 8


@pytest.fixture(scope="module")
def smollm2():
    try:
        folder = plain_folder("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    config = EngineConfig(
        backend="eager", max_seqs=8, max_tokens_per_step=64, context=256, max_graphs=4
    )
    return LLM(folder, config)


@pytest.fixture(scope="module")
def prompts():
    return [*TEXTS, *([{"role": "user", "content": each}] for each in QUESTIONS)]


def generated(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of plain `generate`, of all prompts at once, padded on the left."""
    end = model.config.eos_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=COUNT, do_sample=False)
    rows = out[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def test_answers_to_real_prompts_have_the_tokens_of_plain_generate(smollm2, prompts):
    answers = smollm2.generate(prompts, SamplingParams(max_new_tokens=COUNT))
    plain = AutoModelForCausalLM.from_pretrained(smollm2.tokenizer.model)
    expected = generated(plain, [smollm2.tokenizer.encode(prompt) for prompt in prompts])
    for prompt, answer, tokens in zip(prompts, answers, expected, strict=True):
        assert answer.result.tokens == tokens, prompt


def test_it_knows_the_capital_of_france(smollm2, prompts):
    text, chat = smollm2.generate(
        [TEXTS[0], [{"role": "user", "content": QUESTIONS[0]}]], SamplingParams(max_new_tokens=16)
    )
    assert text.text.startswith(" Paris.")
    assert chat.text == "The capital of France is Paris."
    assert chat.result.finish_reason == "stop"
