"""A bundle of a small model, and what its engine answers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from compiled_attn import LLM
from compiled_attn.bundle import write_bundle
from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.ops import load
from tests.compiled_attn.text.models import save_chat_model

PROMPTS = ["the", "Hello, 你好", "x" * 40]
SHORT = SamplingParams(max_new_tokens=12)


class Written(NamedTuple):
    model: Path
    folder: Path
    texts: list[str]
    chat: str


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    if load().build is None:
        pytest.skip("needs a C++ compiler")
    root = tmp_path_factory.mktemp("bundles")
    model = save_chat_model(root / "model", layers=1)
    sizes = {"max_seqs": 2, "max_tokens_per_step": 16, "num_blocks": 32, "block_size": 8}
    with LLM(model, EngineConfig(**sizes, max_graphs=2, store=False)) as llm:
        write_bundle(llm.engine.executor, llm.tokenizer.of_transformers, root / "bundle", "tiny")
        texts = [answer.text for answer in llm.generate(PROMPTS, SHORT)]
        (chat,) = llm.chat({"role": "user", "content": "Hello"}, SHORT)
    return Written(model, root / "bundle", texts, chat.text)
